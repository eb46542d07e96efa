// The app's one process in development. Vite serves the pages from their source, beside the API.
import { createServer } from "node:http";
import { getRequestListener } from "@hono/node-server";
import { createServer as createVite } from "vite";
import { openBackend } from "./server/backend.ts";
import { listen } from "./server/listen.ts";
import { readSettings } from "./server/settings.ts";

const settings = readSettings();
const { api, close } = await openBackend(settings);
const server = createServer();
const vite = await createVite({
  server: { middlewareMode: true, hmr: { server }, allowedHosts: [new URL(settings.url).hostname] },
});
const callApi = getRequestListener(api.fetch);
server.on("request", (request, response) => {
  if (request.url?.startsWith("/api/")) void callApi(request, response);
  else vite.middlewares(request, response);
});
listen(server, settings, close, 100);
