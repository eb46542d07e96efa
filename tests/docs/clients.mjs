// Asks through the clients of docs/clients.md, all at once. Its standard input holds, as JSON, the file of each client and
// its questions. It prints for each question what was shown, and what the client made of the error, and the error's classes.

import { text } from "node:stream/consumers";

const clients = JSON.parse(await text(process.stdin));

async function put({ ask, explain }, { url, token, prompt }) {
  let shown = "";
  const show = (part) => (shown += part);
  globalThis.build = { VITE_SERVICE_AI_URL: url, token }; // the browser module reads it before it waits for anything
  try {
    await (ask.length === 2 ? ask(prompt, show) : ask(url, token, prompt, show));
  } catch (error) {
    return [shown, explain(error), [error.constructor.name]];
  }
  return [shown, null, []];
}

async function putAll({ file, questions }) {
  const client = await import(file);
  const named = Object.entries(questions).map(async ([name, question]) => [name, await put(client, question)]);
  return Object.fromEntries(await Promise.all(named));
}

const answers = Object.entries(clients).map(async ([name, client]) => [name, await putAll(client)]);
console.log(JSON.stringify(Object.fromEntries(await Promise.all(answers))));
