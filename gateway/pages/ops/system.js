// The parts of the service: Redis, gateways, queues, workers and dead letters.

export const title = "System";
export const live = true;

export const draw = async () => [...document.querySelector("#system").content.cloneNode(true).children];
