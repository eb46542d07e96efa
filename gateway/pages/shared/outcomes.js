// The kinds of outcomes of requests: their names, their tones in charts and lists, and the series of a chart.

const LIMIT = /_(LIMITED|CAP_REACHED)$/;
const OFF = /^(INFERENCE_DISABLED|APP_SUSPENDED)$/;
const OURS = /^(PROVIDER_(?!REFUSED)|BACKBONE_|APP_BACKEND_|INTERNAL)/;

export const KINDS = {
  answered: ["answered", "good"],
  faulty: ["invalid or unauthorized", "idle"],
  limited: ["over a limit", "warn"],
  off: ["refused while off", "plain"],
  failed: ["failed", "bad"],
  left: ["abandoned by the caller", "busy"],
};

export function kindOf(code) {
  if (!code) return "answered";
  if (code === "CLIENT_GONE") return "left";
  if (OFF.test(code)) return "off";
  if (LIMIT.test(code)) return "limited";
  return OURS.test(code) ? "failed" : "faulty";
}

// Returns the number of each kind. `codes` are those of the answers that are not complete.
export function byKind({ requests, codes }) {
  const sums = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
  sums.answered = requests;
  for (const [code, often] of Object.entries(codes)) {
    sums[kindOf(code)] += often;
    sums.answered -= often;
  }
  return sums;
}

// The series of a chart, one value per row.
export function outcomeSeries(rows) {
  const sums = rows.map(byKind);
  return Object.entries(KINDS)
    .map(([kind, [name, tone]]) => ({ name, tone, values: sums.map((each) => each[kind]) }))
    .filter(({ values, tone }) => tone === "good" || values.some(Boolean));
}
