"""Start commands under a real watchdog, in the real sandbox: Node servers that describe their environment."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from gateway.accounts.vault import Vault
from tests.support.hosted_apps import Hosting
from tests.support.polling import wait_until
from tests.support.sandbox import checked_sandbox
from workers.hosting import watchdog as module
from workers.hosting.watchdog import DATA_LIMIT, LIMITS, AppState, Watchdog, read_state

# It answers with the name of its release. Some paths end it.
SERVER = """
const fs = require('fs'), http = require('http'), { PORT, HOST, HOME } = process.env
const born = Math.random()
const answers = {
  '/who': () => JSON.stringify({ uid: process.getuid?.(), pid: process.pid, home: HOME, cwd: process.cwd() }),
  '/write': () => { fs.writeFileSync(HOME + '/note', 'x'); return 'kept' },
  '/deface': () => { fs.writeFileSync('index.html', 'x'); return 'done' },
  '/born': () => String(born),
  '/neighbours': () => JSON.stringify(fs.readdirSync(HOME + '/..')),
  '/exit': () => process.exit(3),
  '/kill': () => process.kill(process.pid, 'SIGKILL'),
  '/eat': () => { const all = []; for (;;) all.push(Buffer.alloc(1 << 24, 1)) },
}
const server = http.createServer((request, response) => {
  if (request.url.startsWith('/exists/')) return response.end(String(fs.existsSync(request.url.slice(7))))
  if (request.url === '/slow') return setTimeout(() => response.end('slow'), 700)
  try { response.end((answers[request.url] ?? (() => 'release ' + fs.readFileSync('name')))()) }
  catch (error) { response.writeHead(500).end(error.code) }
})
process.on('SIGTERM', () => { server.close(() => process.exit(0)); server.closeIdleConnections() })
console.log('starting')
server.listen(PORT, HOST)
"""


class Watch:
    """A running watchdog, and its reports."""

    users = range(61_184, 61_200)  # not used by workers, because other tests may run at the same time
    first_data_limit = DATA_LIMIT

    def __init__(self, hosting: Hosting) -> None:
        self.hosting = hosting
        self.crashes: list[tuple[str, str, int | None]] = []
        self.limits = LIMITS
        self.vault: Vault | None = None
        self.sleeps_after: float | None = None  # seconds
        self.preview_sleeps_after: float | None = None
        self.trusted = False
        self._task: asyncio.Task[None] | None = None

    async def crashed(self, app: str, reason: str, code: int | None, _: list[str]) -> None:
        self.crashes.append((app, reason, code))

    async def find_sleep_limit(self, _: str, *, is_preview: bool) -> float | None:
        return self.preview_sleeps_after if is_preview else self.sleeps_after

    def start(self) -> None:
        if self._task is not None:
            return
        self.sandbox = checked_sandbox(self.users, self.hosting.folder, development=self.trusted, trusted=self.trusted)
        watchdog = Watchdog(
            self.hosting.folder,
            self.sandbox,
            self.crashed,
            self.limits,
            self.vault,
            self.find_sleep_limit,
            self.first_data_limit,
        )
        self._task = asyncio.create_task(watchdog.run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def build(self, deploy_id: str, start: str = "node server.js", *, server: str = SERVER, **which: str) -> None:
        deploy = self.hosting.deploy(deploy_id, **which)  # type: ignore[arg-type]
        site = self.hosting.build(deploy, {"server.js": server, "name": deploy_id, "index.html": "mine"}, start)
        self.hosting.releases.run(site.release(deploy_id))

    def publish(self, deploy_id: str, start: str = "node server.js", *, server: str = SERVER, **which: str) -> None:
        self.build(deploy_id, start, server=server, **which)
        self.hosting.site(self.hosting.deploy(deploy_id, **which)).swap(deploy_id)  # type: ignore[arg-type]

    def state(self, deploy_id: str) -> AppState:
        return read_state(self.hosting.folder, deploy_id)

    async def ask(self, deploy_id: str, path: str = "/") -> str:
        """Requests a path once the app listens."""
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    return await self.get(deploy_id, path)
                await asyncio.sleep(0.02)

    async def get(self, deploy_id: str, path: str) -> str:
        connector = aiohttp.UnixConnector(self.state(deploy_id).socket)
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.get(f"http://localhost{path}") as answer,
        ):
            return await answer.text()

    async def end(self, deploy_id: str, path: str) -> None:
        await self.ask(deploy_id)
        with contextlib.suppress(aiohttp.ClientError):
            await self.get(deploy_id, path)


@contextlib.asynccontextmanager
async def watching(watch: Watch, patch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Checks that all apps and their files are gone afterwards."""
    patch.setattr(module, "FIRST_PAUSE_SECONDS", 0.1)
    patch.setattr(module, "CHECK_SECONDS", 0.05)
    yield
    watch.start()
    for link in watch.hosting.releases.running.iterdir():
        if link.is_symlink():
            link.unlink()
    await wait_until(lambda: not [*watch.hosting.releases.running.iterdir()], 20)
    await watch.stop()
