// The overview: requests, models, spending, problems, and the switch of inference.

import { attach } from "./switches.js";

export const title = "Overview";
export const live = true;

export async function draw() {
  const view = document.querySelector("#overview").content.cloneNode(true);
  attach(view);
  return [...view.children];
}
