import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";

// Each migration runs once, in this order. Add new ones at the end, and never change one that has been deployed.
// After a rollback, an older release uses the newer tables, so add columns and tables, and remove none.
const MIGRATIONS = [
  `CREATE TABLE note (
     id INTEGER PRIMARY KEY,
     userId TEXT NOT NULL REFERENCES user (id) ON DELETE CASCADE,
     text TEXT NOT NULL,
     updatedAt INTEGER NOT NULL
   );
   CREATE INDEX noteOfUser ON note (userId, updatedAt)`,
];

/** Opens the app's database. While a deploy goes live, the old and the new release share it. */
export function openDatabase(folder: string): DatabaseSync {
  const database = new DatabaseSync(join(folder, "app.db"), { timeout: 5000 });
  database.exec("PRAGMA journal_mode = WAL");
  return database;
}

/** Runs the migrations that this database has not seen. */
export function migrate(database: DatabaseSync): void {
  database.exec("BEGIN IMMEDIATE");
  try {
    const version = Number(database.prepare("PRAGMA user_version").get()?.["user_version"]);
    for (const sql of MIGRATIONS.slice(version)) database.exec(sql);
    database.exec(`PRAGMA user_version = ${Math.max(version, MIGRATIONS.length)}; COMMIT`);
  } catch (error) {
    database.exec("ROLLBACK");
    throw error;
  }
}
