// A receiver for event webhooks. It needs only Node.
//
// SERVICE_WEBHOOK_SECRET=whsec_… node receiver.mjs [port]

import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const SECRET = process.env.SERVICE_WEBHOOK_SECRET;
if (!SECRET) throw new Error("SERVICE_WEBHOOK_SECRET is not set");
const MAX_AGE = 5 * 60 * 1000; // ms
const MAX_BYTES = 2 ** 20;

function genuine(headers, body) {
  const timestamp = headers["x-service-timestamp"] ?? "";
  const signature = Buffer.from(headers["x-service-signature"] ?? "", "latin1");
  if (!/^\d{1,15}$/.test(timestamp)) return false;
  // The bytes as received; re-encoded JSON would differ.
  const expected = Buffer.from(
    "sha256=" + createHmac("sha256", SECRET).update(`${timestamp}.`).update(body).digest("hex"),
  );
  if (signature.length !== expected.length || !timingSafeEqual(signature, expected)) return false;
  return Math.abs(Date.now() - Number(timestamp)) <= MAX_AGE;
}

const server = createServer((request, response) => {
  const parts = [];
  let length = 0;
  request.on("data", (part) => {
    length += part.length;
    if (length <= MAX_BYTES) parts.push(part);
    else if (!response.headersSent) response.writeHead(413, { Connection: "close" }).end();
  });
  request.on("end", () => {
    if (response.headersSent) return;
    const body = Buffer.concat(parts);
    if (request.method !== "POST") return response.writeHead(405).end();
    if (!genuine(request.headers, body)) return response.writeHead(401).end();
    response.writeHead(204).end(); // respond immediately: after 5 s, the delivery fails
    const event = JSON.parse(body);
    // The same id can arrive twice. If an event must be processed only once, remember its id.
    console.log(event.id, event.type, event.data);
  });
});

server.listen(Number(process.argv[2] ?? 3000), "127.0.0.1", () => {
  console.log(`listening on ${server.address().port}`);
});
