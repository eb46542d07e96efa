// Starts the app as the service does, on a folder of its own, and calls it as a browser does.
import assert from "node:assert/strict";
import { type ChildProcess, spawn } from "node:child_process";
import { createPublicKey, randomBytes, verify } from "node:crypto";
import { once } from "node:events";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";

const PASSWORD = "correct horse battery";
const SECRET = randomBytes(32).toString("hex");
let data = "";
let app: { process: ChildProcess; url: string };

async function start(secret = SECRET): Promise<typeof app> {
  const env = { ...process.env, PORT: "0", HOST: "127.0.0.1", DATA_DIR: data, BETTER_AUTH_SECRET: secret };
  const child = spawn(process.execPath, ["server.ts"], { env, stdio: ["ignore", "pipe", "inherit"] });
  for await (const line of createInterface({ input: child.stdout })) {
    const url = /http:\S+/.exec(line)?.[0];
    if (url) return { process: child, url };
  }
  throw new Error("The app ended before it listened.");
}

async function stop(): Promise<void> {
  app.process.kill("SIGTERM");
  const [code] = await once(app.process, "exit");
  assert.equal(code, 0);
}

before(async () => {
  data = await mkdtemp(join(tmpdir(), "app-"));
  app = await start();
});

after(async () => {
  await stop();
  await rm(data, { recursive: true });
});

/** A browser of one person, with its cookies and its address: each address may sign in only so often. */
class Person {
  private static count = 0;
  private readonly cookies = new Map<string, string>();
  private readonly address = `192.0.2.${++Person.count}`;

  async call(method: string, path: string, body?: unknown, origin = app.url): Promise<Response> {
    const cookie = [...this.cookies].map(([name, value]) => `${name}=${value}`).join("; ");
    const response = await fetch(app.url + path, {
      method,
      headers: {
        Cookie: cookie,
        Origin: origin,
        "X-Forwarded-For": this.address,
        ...(body !== undefined && { "Content-Type": "application/json" }),
      },
      body: body === undefined ? null : JSON.stringify(body),
    });
    for (const line of response.headers.getSetCookie()) {
      const [, name, value] = /^([^=]+)=([^;]*)/.exec(line) ?? [];
      this.cookies.set(name ?? "", value ?? "");
    }
    return response;
  }

  async signUp(email: string): Promise<this> {
    const response = await this.call("POST", "/api/auth/sign-up/email", { name: "A person", email, password: PASSWORD });
    assert.equal(response.status, 200, await response.text());
    return this;
  }

  async note(text: string): Promise<number> {
    const response = await this.call("POST", "/api/notes", { text });
    assert.equal(response.status, 201);
    return (await response.json()).id;
  }

  async notes(): Promise<string[]> {
    const notes: { text: string }[] = await (await this.call("GET", "/api/notes")).json();
    return notes.map(({ text }) => text);
  }
}

const read = (part = "") => JSON.parse(Buffer.from(part, "base64url").toString());

test("the token of a user verifies against the published keys, and names nothing but the user", async () => {
  const person = await new Person().signUp("token@example.com");
  const { user } = await (await person.call("GET", "/api/auth/get-session")).json();
  const { token } = await (await person.call("GET", "/api/auth/token")).json();
  const [head, payload, signature] = token.split(".");
  assert.equal(read(head).alg, "ES256");
  assert.equal(read(payload).sub, user.id);
  assert.ok(!JSON.stringify(read(payload)).includes("@"));

  const { keys } = await (await fetch(`${app.url}/api/auth/jwks`)).json();
  const key = createPublicKey({ key: keys.find(({ kid }: { kid: string }) => kid === read(head).kid), format: "jwk" });
  const signed = Buffer.from(`${head}.${payload}`);
  assert.ok(verify("sha256", signed, { key, dsaEncoding: "ieee-p1363" }, Buffer.from(signature, "base64url")));
});

test("nobody reads, changes or deletes another person's note", async () => {
  const [ana, ben] = [await new Person().signUp("ana@example.com"), await new Person().signUp("ben@example.com")];
  const id = await ana.note("Ana's note");
  assert.deepEqual(await ben.notes(), []);
  assert.equal((await ben.call("PUT", `/api/notes/${id}`, { text: "Ben's" })).status, 404);
  assert.equal((await ben.call("DELETE", `/api/notes/${id}`)).status, 404);
  assert.deepEqual(await ana.notes(), ["Ana's note"]);
  assert.equal((await ana.call("PUT", `/api/notes/${id}`, { text: "Changed" })).status, 200);
  assert.deepEqual(await ana.notes(), ["Changed"]);
  assert.equal((await ana.call("DELETE", `/api/notes/${id}`)).status, 204);
  assert.deepEqual(await ana.notes(), []);
});

test("notes need a session, some text, and the app's own pages", async () => {
  assert.equal((await new Person().call("GET", "/api/notes")).status, 401);
  const person = await new Person().signUp("rules@example.com");
  for (const body of [{}, { text: " " }, { text: "x".repeat(20_001) }, "text"]) {
    assert.equal((await person.call("POST", "/api/notes", body)).status, 400);
  }
  assert.equal((await person.call("POST", "/api/notes", { text: "x".repeat(200_000) })).status, 413);
  const elsewhere = "https://other.example.com";
  assert.equal((await person.call("POST", "/api/auth/sign-out", {}, elsewhere)).status, 403);
  assert.equal((await person.call("POST", "/api/notes", undefined, elsewhere)).status, 403);
});

test("a restart keeps notes and sessions, and a new secret the notes", async () => {
  const person = await new Person().signUp("kept@example.com");
  await person.note("Still here");
  await stop();
  app = await start();
  assert.deepEqual(await person.notes(), ["Still here"]);
  await stop();
  app = await start(randomBytes(32).toString("hex"));
  assert.equal((await person.call("GET", "/api/notes")).status, 401);
  const again = await person.call("POST", "/api/auth/sign-in/email", { email: "kept@example.com", password: PASSWORD });
  assert.equal(again.status, 200);
  assert.equal((await person.call("GET", "/api/auth/token")).status, 200);
  assert.deepEqual(await person.notes(), ["Still here"]);
});
