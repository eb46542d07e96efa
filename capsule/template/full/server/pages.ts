import { join } from "node:path";
import { serveStatic } from "@hono/node-server/serve-static";

const DIST = join(import.meta.dirname, "..", "dist");

/** Serves the built pages. Vite names assets by their content, so browsers may keep them. */
export function servePages() {
  return serveStatic({
    root: DIST,
    onFound: (path, c) => {
      const isAsset = path.startsWith(join(DIST, "assets"));
      c.header("Cache-Control", isAsset ? "public, max-age=31536000, immutable" : "no-cache");
    },
  });
}
