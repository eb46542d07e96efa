// What goes on: requests, models, spend, and what needs attention. Inference is switched here.

import { attach } from "./switches.js";

export const title = "Overview";
export const live = true;

export async function draw() {
  const view = document.querySelector("#overview").content.cloneNode(true);
  attach(view);
  return [...view.children];
}
