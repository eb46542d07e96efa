export interface Turn {
  question: string;
  answer: string;
}

const HISTORY = 12_000; // characters of earlier turns that the model sees again

/** Returns the text for the model, which itself remembers nothing: earlier turns, the note, and the question. */
export function writePrompt(question: string, earlier: Turn[], note?: string): string {
  const parts: string[] = [];
  const history = recent(earlier);
  if (history) parts.push(`Our conversation so far:\n\n${history}`);
  if (note) parts.push(`My note:\n\n${note}`);
  return parts.length ? [...parts, `My question:\n\n${question}`].join("\n\n---\n\n") : question;
}

function recent(earlier: Turn[]): string {
  const kept: string[] = [];
  let room = HISTORY;
  for (const { question, answer } of earlier.toReversed()) {
    const turn = `I asked: ${question}\n\nYou answered: ${answer}`;
    room -= turn.length;
    if (room < 0) break;
    kept.unshift(turn);
  }
  return kept.join("\n\n");
}
