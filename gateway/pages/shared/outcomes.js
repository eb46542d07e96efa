// The kinds of outcomes of requests: their names, and their tones in charts and lists.

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
