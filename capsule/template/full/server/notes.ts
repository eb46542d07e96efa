import type { DatabaseSync } from "node:sqlite";
import { Hono } from "hono";
import { HTTPException } from "hono/http-exception";

const LONGEST = 20_000; // characters of a note
const MOST = 1_000; // notes of a user

/** The notes of the signed-in user. Nobody reads or changes another user's. */
export function notesOf(database: DatabaseSync) {
  const list = database.prepare("SELECT id, text, updatedAt FROM note WHERE userId = ? ORDER BY updatedAt DESC, id DESC");
  const count = database.prepare("SELECT count(*) AS notes FROM note WHERE userId = ?");
  const insert = database.prepare(
    "INSERT INTO note (userId, text, updatedAt) VALUES (?, ?, ?) RETURNING id, text, updatedAt",
  );
  const update = database.prepare(
    "UPDATE note SET text = ?, updatedAt = ? WHERE id = ? AND userId = ? RETURNING id, text, updatedAt",
  );
  const remove = database.prepare("DELETE FROM note WHERE id = ? AND userId = ?");

  return new Hono<{ Variables: { user: string } }>()
    .get("/", (c) => c.json(list.all(c.var.user)))
    .post("/", async (c) => {
      const text = readText(await c.req.json());
      if (Number(count.get(c.var.user)?.["notes"]) >= MOST) refuse(409, `You can keep ${MOST} notes. Delete some first.`);
      return c.json(insert.get(c.var.user, text, Date.now()), 201);
    })
    .put("/:id{[0-9]+}", async (c) => {
      const note = update.get(readText(await c.req.json()), Date.now(), c.req.param("id"), c.var.user);
      return note ? c.json(note) : c.notFound();
    })
    .delete("/:id{[0-9]+}", (c) => {
      const { changes } = remove.run(c.req.param("id"), c.var.user);
      return changes ? c.body(null, 204) : c.notFound();
    });
}

function readText(body: unknown): string {
  const text = body && typeof body === "object" && "text" in body ? body.text : undefined;
  if (typeof text !== "string" || !text.trim()) refuse(400, "A note needs some text.");
  if (text.length > LONGEST) refuse(400, `A note can have ${LONGEST} characters. Shorten it.`);
  return text.trim();
}

function refuse(status: 400 | 409, message: string): never {
  throw new HTTPException(status, { message });
}
