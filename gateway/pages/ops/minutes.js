// Draws the last hour's requests, one bar per minute: answered requests at the bottom, the others stacked by kind.

import { h, svg } from "/pages/dom.js";
import { roughly } from "/pages/format.js";

const WIDTH = 600;
const HEIGHT = 120;
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

const LIMIT = /_(LIMITED|CAP_REACHED)$/;
const OURS = /^(PROVIDER_(?!REFUSED)|BACKBONE_|APP_BACKEND_|INTERNAL)/;

export const KINDS = [
  ["answered", "answered"],
  ["faulty", "invalid or unauthorized"],
  ["limited", "over a limit"],
  ["off", "refused while off"],
  ["failed", "failed"],
  ["left", "abandoned by the caller"],
];

export function kindOf(code) {
  if (code === "CLIENT_GONE") return "left";
  if (code === "INFERENCE_DISABLED") return "off";
  if (LIMIT.test(code)) return "limited";
  return OURS.test(code) ? "failed" : "faulty";
}

function byKind({ requests, codes }) {
  const sums = { answered: requests, faulty: 0, limited: 0, off: 0, failed: 0, left: 0 };
  for (const [code, often] of Object.entries(codes)) {
    sums[kindOf(code)] += often;
    sums.answered -= often;
  }
  return sums;
}

export function total(minutes) {
  const sums = Object.fromEntries(KINDS.map(([kind]) => [kind, 0]));
  for (const minute of minutes) {
    for (const [kind, often] of Object.entries(byKind(minute))) sums[kind] += often;
  }
  return sums;
}

export function chart(minutes) {
  const peak = Math.max(...minutes.map(({ requests }) => requests), 1);
  const step = WIDTH / minutes.length;
  const drawn = minutes.map((minute, n) => {
    const sums = byKind(minute);
    const at = clock.format(Date.parse(minute.minute));
    const parts = KINDS.filter(([kind]) => sums[kind]).map(([kind, name]) => `${roughly(sums[kind])} ${name}`);
    let top = HEIGHT;
    return svg(
      "g",
      {},
      svg("title", {}, `${at}: ${parts.join(", ") || "nothing"}`),
      svg("rect", { class: "over", x: n * step, y: 0, width: step, height: HEIGHT }),
      KINDS.map(([kind]) => {
        const height = sums[kind] && Math.max((sums[kind] / peak) * HEIGHT, 1.5);
        top -= height;
        return height > 0 && svg("rect", { class: kind, x: n * step + 1, y: Math.max(top, 0), width: step - 2, height });
      }),
    );
  });
  const total = minutes.reduce((sum, { requests }) => sum + requests, 0);
  return h(
    "figure",
    { class: "chart minutes" },
    h("span", { class: "peak", "aria-hidden": "true" }, `${roughly(peak)} per minute`),
    svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${roughly(total)} requests in the last hour, at most ${roughly(peak)} per minute`,
      },
      drawn,
    ),
    h(
      "div",
      { class: "hours", "aria-hidden": "true" },
      [0, 15, 30, 45].map((n) => h("span", {}, clock.format(Date.parse(minutes[n].minute)))),
      h("span", {}, "now"),
    ),
  );
}
