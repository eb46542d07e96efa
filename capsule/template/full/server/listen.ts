import type { Server } from "node:http";
import type { AddressInfo } from "node:net";

/** Listens, and prints the address. On SIGTERM or SIGINT, open requests have some time to end before `close` is called. */
export function listen(
  server: Server,
  { host, port }: { host: string; port: number },
  close: () => void,
  graceMs = 5_000,
): void {
  server.listen(port, host, () => {
    console.log(`Listening on http://${host}:${(server.address() as AddressInfo).port}`);
  });
  const end = () => {
    close();
    process.exit();
  };
  const stop = () => {
    server.close(end);
    setTimeout(end, graceMs).unref();
  };
  process.once("SIGTERM", stop);
  process.once("SIGINT", stop);
}
