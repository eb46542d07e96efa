// Draws the last hour's requests, one bar per minute: answered requests at the bottom, the others stacked by kind.

import { chart } from "/pages/chart.js";
import { KINDS, byKind, outcomeSeries } from "/pages/outcomes.js";

export function total(minutes) {
  const sums = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
  for (const minute of minutes) {
    for (const [kind, often] of Object.entries(byKind(minute))) sums[kind] += often;
  }
  return sums;
}

export function minuteChart(minutes) {
  return chart("Requests per minute", outcomeSeries(minutes), minutes.map(({ minute }) => Date.parse(minute)));
}
