"""What serves a data folder, inside the test: in place of Caddy and of the watchdog, without sandboxes.

They follow the links and marks in the folder (`workers/hosting/releases.py`), as `Caddyfile` and `watchdog.py` do.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Self

import msgspec

from tests.fakes.start_commands import END_SECONDS, ENDED, StartCommands, ask, http_server
from tests.support.background import cancel
from workers.hosting import caddy
from workers.hosting.releases import Releases, Site
from workers.hosting.watchdog import AppState, control_path, start_time, state_path
from workers.sandbox.relay import MESSAGE_BYTES

LOOK_SECONDS = 0.01  # between looks at the links
HELD_SECONDS = 10.0  # that a request waits
SWAPS = 3  # that may come between the look-up of a release and its request


class FakeHost:
    def __init__(self, folder: Path, commands: StartCommands) -> None:
        self.releases, self.commands = Releases(folder), commands
        self.releases.create_folders()
        self._folder = self.releases.folder
        self._servers: dict[str, asyncio.Server] = {}  # by deploy
        self._controls: list[asyncio.Server] = []
        self._asleep: set[str] = set()
        self._ended: set[str] = set()  # start commands that have ended by themselves
        self._restarted: set[str] = set()  # and those of them that run again
        self._ending: dict[str, asyncio.Task[None]] = {}
        self.held_seconds = HELD_SECONDS

    async def __aenter__(self) -> Self:
        (self._folder / "caddy").mkdir()
        socket = str(caddy.canary_socket(self._folder))
        self._web = await asyncio.start_unix_server(http_server(self.answer), socket)
        self._process = await asyncio.create_subprocess_exec("sleep", "inf")  # who stops Caddy stops this
        process = caddy.CaddyProcess(self._process.pid, start_time(self._process.pid) or 0, "", "")
        (self._folder / "web" / "caddy.json").write_bytes(msgspec.json.encode(process))
        self._supervising = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        await cancel(self._supervising, *self._ending.values())
        await self._process.wait()
        for server in (self._web, *self._servers.values(), *self._controls):
            server.close()

    # -- in place of Caddy -----------------------------------------------------------------------------------

    async def visit(self, host: str) -> tuple[int, str]:
        return await ask(await asyncio.open_unix_connection(str(caddy.canary_socket(self._folder))), host)

    async def answer(self, host: str, path: str) -> tuple[int, str]:
        if host.endswith(".check"):
            deploy, address, app, _ = host.split(".")
            return self._answer_with_files(self.releases.find_site(app, address).release(deploy), path)
        for _ in range(SWAPS):
            site = self.releases.site_at(host)
            if site is None or not (site.folder / "current").is_dir():
                return 404, ""
            if site.is_suspended or (site.folder / "stopped").exists():
                return 503, ""
            if url := self.releases.read_redirect(host):
                return 308, url
            with contextlib.suppress(OSError, EOFError):
                return await self._answer_for(site, host, path)
        return 502, ""

    async def _answer_for(self, site: Site, host: str, path: str) -> tuple[int, str]:
        """Raises OSError and EOFError if the app does not answer."""
        ends, is_held = asyncio.get_running_loop().time() + self.held_seconds, (site.folder / "held").is_dir()
        while True:
            release = site.release(site.current or "")
            if not (release / "start").exists():
                return self._answer_with_files(release, path)
            try:
                return await ask(await asyncio.open_unix_connection(str(release / "sock")), host, path)
            except (OSError, EOFError):
                if not is_held or asyncio.get_running_loop().time() > ends:
                    raise
            await asyncio.sleep(LOOK_SECONDS)

    def _answer_with_files(self, release: Path, path: str) -> tuple[int, str]:
        found = (release / "files" / "index.html").is_file()
        return self.commands.answer(release.name, path) if found else (404, "")

    # -- in place of the watchdog ----------------------------------------------------------------------------

    async def let_sleep(self, deploy: str) -> None:
        self.commands.end(deploy)
        self._asleep.add(deploy)
        (self.releases.running / f"{deploy}.asleep").touch()
        self._write(deploy, AppState(str(self._socket(deploy)), asleep=True))

    async def _supervise(self) -> None:
        while True:
            wanted = self.releases.releases_to_run()
            wanted = {name: path for name, path in wanted.items() if not Site(path.parent).is_suspended}
            for deploy in self._servers.keys() - wanted.keys() - self._ending.keys():
                self._ending[deploy] = asyncio.create_task(self._stop(deploy))
            for deploy in self.commands.ending & self.commands.running & self._servers.keys():
                self._servers.pop(deploy).close()
                self._end_by_itself(deploy)
            for deploy in wanted.keys() - self._servers.keys() - self._ended:
                await self._start(deploy)
            for deploy in self.commands.restarted & self._servers.keys() - self._restarted:
                self._restarted.add(deploy)
                self._write(deploy, AppState(str(self._socket(deploy)), exits=1, last=ENDED))
            self.releases.confirm_stops(self._servers.keys())
            for deploy in self._ended - wanted.keys():
                self._ended.discard(deploy)
                self._remove_files(deploy)
            await asyncio.sleep(LOOK_SECONDS)

    async def _start(self, deploy: str) -> None:
        self.commands.begin(deploy)
        if deploy in self.commands.ending:
            return self._end_by_itself(deploy)

        async def answer(_: str, path: str) -> tuple[int, str]:
            if deploy in self._asleep:
                self._asleep.discard(deploy)
                (self.releases.running / f"{deploy}.asleep").unlink(missing_ok=True)
                self.commands.begin(deploy)
                self._write(deploy, AppState(str(self._socket(deploy))))
            if deploy in self.commands.elsewhere:
                raise EOFError
            return self.commands.answer(deploy, path)

        async def say_listening(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                await reader.read(MESSAGE_BYTES)
                writer.write(self.commands.describe_listening(deploy))

        control = control_path(self._folder, deploy)
        self._controls.append(await asyncio.start_unix_server(say_listening, str(control)))
        self._servers[deploy] = await asyncio.start_unix_server(http_server(answer), str(self._socket(deploy)))
        self._write(deploy, AppState(str(self._socket(deploy))))

    def _end_by_itself(self, deploy: str) -> None:
        self.commands.end(deploy)
        self._ended.add(deploy)
        self._socket(deploy).unlink(missing_ok=True)
        self._write(deploy, AppState(exits=1, last=ENDED))

    async def _stop(self, deploy: str) -> None:
        self._servers[deploy].close()
        self._socket(deploy).unlink(missing_ok=True)
        await asyncio.sleep(END_SECONDS)
        self.commands.end(deploy)
        self._asleep.discard(deploy)
        self._remove_files(deploy)
        del self._servers[deploy], self._ending[deploy]

    def _remove_files(self, deploy: str) -> None:
        for path in self.releases.running.glob(f"{deploy}.*"):
            path.unlink()

    def _socket(self, deploy: str) -> Path:
        return self.releases.running / f"{deploy}.sock"

    def _write(self, deploy: str, state: AppState) -> None:
        state_path(self._folder, deploy).write_bytes(msgspec.json.encode(state))
