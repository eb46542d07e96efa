import { Hono } from "hono";
import { bodyLimit } from "hono/body-limit";
import { csrf } from "hono/csrf";
import { HTTPException } from "hono/http-exception";
import { secureHeaders } from "hono/secure-headers";
import { createAuth, migrateAuth, originsOf } from "./auth.ts";
import { migrate, openDatabase } from "./database.ts";
import { notesOf } from "./notes.ts";
import type { Settings } from "./settings.ts";

const BODY_BYTES = 100 * 1024;

export type Backend = Awaited<ReturnType<typeof openBackend>>;

/** Opens the database, brings its tables up to date, and returns the API on it. */
export async function openBackend(settings: Settings) {
  const database = openDatabase(settings.data);
  const auth = createAuth(database, settings);
  await migrateAuth(auth, database);
  migrate(database);

  const api = new Hono<{ Variables: { user: string } }>();
  api.use(
    secureHeaders({
      contentSecurityPolicy: { scriptSrc: ["'self'"], objectSrc: ["'none'"], baseUri: ["'none'"] },
      referrerPolicy: "strict-origin-when-cross-origin",
      strictTransportSecurity: false, // whoever serves the app's domain decides
    }),
  );
  api.use("/api/*", bodyLimit({ maxSize: BODY_BYTES }));
  api.use("/api/*", csrf({ origin: (origin, c) => originsOf(c.req.header("host")).includes(origin) }));
  api.on(["GET", "POST"], "/api/auth/*", (c) => auth.handler(c.req.raw));
  api.use("/api/*", async (c, next) => {
    const session = await auth.api.getSession({ headers: c.req.raw.headers });
    if (!session) throw new HTTPException(401, { message: "Sign in first." });
    c.set("user", session.user.id);
    c.header("Cache-Control", "no-store");
    await next();
  });
  api.route("/api/notes", notesOf(database));
  api.onError((error, c) => {
    if (error instanceof HTTPException) return c.json({ error: error.message }, error.status);
    console.error(error);
    return c.json({ error: "Something went wrong. Try again." }, 500);
  });
  return { api, close: () => database.close() };
}
