// The parts that the service consists of: Redis, gateways, queues, workers, and what they could not process.

export const title = "System";
export const live = true;

export const draw = async () => [...document.querySelector("#system").content.cloneNode(true).children];
