// The app's one process in production. It serves the built pages and the API.
import { createServer } from "node:http";
import { getRequestListener } from "@hono/node-server";
import { openBackend } from "./server/backend.ts";
import { listen } from "./server/listen.ts";
import { servePages } from "./server/pages.ts";
import { readSettings } from "./server/settings.ts";

const settings = readSettings();
const { api, close } = await openBackend(settings);
api.get("*", servePages());
listen(createServer(getRequestListener(api.fetch)), settings, close);
