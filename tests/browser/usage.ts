// How a TypeScript app uses the module; a line marked as an error must be one.
import { AiError, complete, streamComplete } from "../../capsule/lib/ai.js";

const answer: string = await complete("Why?");
const parts: string[] = [];
const whole: string = await streamComplete("Why?", (token) => void parts.push(token));
await streamComplete("Why?", async (token) => void parts.push(token), { signal: AbortSignal.timeout(1000) });
await streamComplete("Why?", () => {}, { signal: undefined });
await streamComplete("Why?", () => {}, {});
await streamComplete("Why?", () => {}, { effort: "low" });
await complete("Why?", { effort: "high" });
await complete("Why?", { effort: undefined });
await streamComplete("Why?", () => {}, {
  onDone: ({ finishReason, usage }) => {
    const cut: boolean = finishReason === "length";
    const output: number | undefined = usage?.outputTokens;
    console.log(cut, output);
  },
});

try {
  await complete(answer + whole);
} catch (error) {
  if (!(error instanceof AiError)) throw error;
  const wait: number | undefined = error.retryAfter;
  const status: number | undefined = error.status;
  const code: string = error.code;
  if (error.code === "USER_RATE_LIMITED" || error.code === "A_CODE_TO_COME") console.log(code, status, wait);
  // @ts-expect-error
  error.code = "OTHER";
  // @ts-expect-error
  const never: number = error.retryAfter;
}

// @ts-expect-error
await complete();
// @ts-expect-error
await complete({ messages: [] });
// @ts-expect-error
await complete("Why?", { effort: "none" });
// @ts-expect-error
await streamComplete("Why?");
// @ts-expect-error
await streamComplete("Why?", (token: number) => {});
// @ts-expect-error
await streamComplete("Why?", () => {}, { timeout: 5 });
