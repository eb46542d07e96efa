import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { writePrompt } from "../src/prompt.ts";
import { explain } from "../src/words.js";

test("each code of the service has words", async () => {
  const declared = await readFile("vendor/capsule-ai/lib/ai.d.ts", "utf8");
  const codes = [...declared.matchAll(/^ {2}\| "([A-Z_]+)"/gm)].map(([, code]) => code ?? "");
  assert.ok(codes.length > 20);
  const unknown = explain({ code: "NEW_CODE", message: "" });
  assert.equal(unknown.advice, "The service returned NEW_CODE.");
  for (const code of codes) assert.notEqual(explain({ code, message: "" }).heading, unknown.heading, code);
});

test("the model sees the note and recent turns, and a lone question as it is", () => {
  assert.equal(writePrompt("Why?", []), "Why?");
  const turns = [
    { question: "Old", answer: "x".repeat(20_000) },
    { question: "Who?", answer: "Ana" },
  ];
  const prompt = writePrompt("Why?", turns, "The note");
  assert.match(prompt, /I asked: Who\?\n\nYou answered: Ana[^]*My note:\n\nThe note[^]*Why\?$/);
  assert.doesNotMatch(prompt, /Old/);
});
