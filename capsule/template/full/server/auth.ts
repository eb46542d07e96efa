import type { DatabaseSync } from "node:sqlite";
import { betterAuth } from "better-auth";
import { symmetricDecrypt } from "better-auth/crypto";
import { getMigrations } from "better-auth/db/migration";
import { jwt } from "better-auth/plugins";
import type { Settings } from "./settings.ts";

export type Auth = ReturnType<typeof createAuth>;

/** Sign-in with e-mail and password, and tokens for the model. The service checks them with /api/auth/jwks. */
export function createAuth(database: DatabaseSync, { url, secret }: Settings) {
  return betterAuth({
    baseURL: url,
    secret,
    database,
    trustedOrigins: (request) => originsOf(request?.headers.get("host")),
    emailAndPassword: { enabled: true },
    rateLimit: { enabled: true },
    telemetry: { enabled: false },
    plugins: [
      jwt({
        jwks: { keyPairConfig: { alg: "ES256" } },
        // The service needs only the user's id.
        jwt: { definePayload: () => ({}) },
      }),
    ],
  });
}

/** Returns the origins of pages at this host. The app may also have a custom domain, and no script can set this header. */
export function originsOf(host: string | null | undefined): string[] {
  return host ? [`http://${host}`, `https://${host}`] : [];
}

/** Creates or extends the tables of users and sessions. */
export async function migrateAuth(auth: Auth, database: DatabaseSync): Promise<void> {
  const { runMigrations } = await getMigrations(auth.options);
  await runMigrations();
  await dropKeysOfOtherSecrets(auth, database);
}

/** A key that another secret encrypts signs nothing. Without it, the next token gets a new key. */
async function dropKeysOfOtherSecrets(auth: Auth, database: DatabaseSync): Promise<void> {
  const { secretConfig } = await auth.$context;
  for (const { id, privateKey } of database.prepare("SELECT id, privateKey FROM jwks").all()) {
    const decrypted = symmetricDecrypt({ key: secretConfig, data: JSON.parse(String(privateKey)) });
    await decrypted.catch(() => database.prepare("DELETE FROM jwks WHERE id = ?").run(String(id)));
  }
}
