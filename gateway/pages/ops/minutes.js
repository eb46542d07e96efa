// Draws the last hour's requests, one bar per minute: answered requests at the bottom, the others stacked by kind.

import { chart } from "/pages/chart.js";
import { KINDS, kindOf } from "/pages/outcomes.js";

function byKind({ requests, codes }) {
  const sums = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
  sums.answered = requests;
  for (const [code, often] of Object.entries(codes)) {
    sums[kindOf(code)] += often;
    sums.answered -= often;
  }
  return sums;
}

export function total(minutes) {
  const sums = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
  for (const minute of minutes) {
    for (const [kind, often] of Object.entries(byKind(minute))) sums[kind] += often;
  }
  return sums;
}

// The series of a chart of minutes or hours.
export function seriesOf(rows) {
  const sums = rows.map(byKind);
  return Object.entries(KINDS)
    .map(([kind, [name, tone]]) => ({ name, tone, values: sums.map((each) => each[kind]) }))
    .filter(({ values, tone }) => tone === "good" || values.some(Boolean));
}

export function minuteChart(minutes) {
  return chart("Requests per minute", seriesOf(minutes), minutes.map(({ minute }) => Date.parse(minute)));
}
