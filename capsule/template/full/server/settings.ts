import { randomBytes } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";

export interface Settings {
  host: string;
  port: number;
  /** The folder that outlives deploys and restarts. */
  data: string;
  /** The app's public address. */
  url: string;
  /** Signs sessions, and encrypts the key that signs tokens. */
  secret: string;
}

/** Reads the variables that the service sets. The defaults are for development without the service. */
export function readSettings(env = process.env): Settings {
  const port = Number(env.PORT || 3000);
  const data = resolve(env.DATA_DIR || "data");
  mkdirSync(data, { recursive: true });
  return {
    host: env.HOST || "127.0.0.1",
    port,
    data,
    url: env.APP_URL || `http://localhost:${port}`,
    secret: env.BETTER_AUTH_SECRET || storedSecret(join(data, "secret")),
  };
}

function storedSecret(file: string): string {
  if (!existsSync(file)) writeFileSync(file, randomBytes(32).toString("base64url"), { mode: 0o600 });
  return readFileSync(file, "utf8");
}
