"""A data folder with releases of apps, and the Caddy that serves it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from gateway.accounts.records import App
from gateway.deploys.addresses import address
from gateway.deploys.records import Deploy
from gateway.deploys.release import Release, ReleaseArchive
from gateway.deploys.serving import Wanted
from gateway.events.catalog import Kind
from gateway.settings import Settings
from tests.support.folders import passable_folder
from tests.support.worker_process import Worker
from workers.engine.driver import Target
from workers.hosting import caddy
from workers.hosting.archives import write_record
from workers.hosting.releases import Releases, Site

DOMAIN = "apps.test"
HOST = f"shop.{DOMAIN}"


@contextlib.contextmanager
def hosted() -> Iterator["Hosting"]:
    """Makes a folder with an app that the test runs."""
    with passable_folder() as folder:
        hosting = Hosting(folder)
        hosting.publish("dep_1", {"index.html": "not to be served"}, start="any")
        yield hosting


class Hosting:
    def __init__(self, folder: Path) -> None:
        self.releases = Releases(folder)
        self.releases.create_folders()
        self.folder = self.releases.folder
        self.port = 0

    def deploy(self, deploy_id: str, app_id: str = "shop", kind: Kind = "live", branch: str | None = None) -> Deploy:
        return Deploy(
            id=deploy_id,
            account="acc_1",
            app=app_id,
            appId=app_id,
            kind=kind,
            state="checking",
            trigger="upload",
            createdAt="2026-07-02T10:00:00.000Z",
            branch=branch,
        )

    def site(self, deploy: Deploy) -> Site:
        return self.releases.site(deploy.account, deploy.appId, address(deploy.kind, deploy.branch))

    def target(self, deploy: Deploy, app: App) -> Target:
        """Returns what a driver gets for the check of a deploy. All releases are in the folder already."""
        archive = ReleaseArchive("digest", 1)
        releases = {path.name: path for path in self.site(deploy).releases()}
        for path in releases.values():
            write_record(path, archive)
        found = {name: Release("digest", 1, (path / "start").exists()) for name, path in releases.items()}
        wanted = Wanted(app.account, app.id, address(deploy.kind, deploy.branch), "check", deploy.id, "", found)
        return Target(wanted, app, deploy.id, [])

    def build(self, deploy: Deploy, files: Mapping[str, str | bytes], start: str | None = None) -> Site:
        """Writes the files of a build. With a start command, it is an app."""
        site = self.site(deploy)
        release = site.release(deploy.id)
        release.mkdir(mode=0o755)
        for name, content in files.items():
            path = release / ("files" if start is None else "app") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        if start is not None:
            (release / "start").write_text(start)
        return site

    def publish(
        self,
        deploy_id: str,
        files: Mapping[str, str | bytes],
        host: str = HOST,
        start: str | None = None,
        **which: str,
    ) -> Site:
        """Serves a build at the host. With a start command, it is an app that is to run."""
        deploy = self.deploy(deploy_id, **which)  # type: ignore[arg-type]
        site = self.build(deploy, files, start)
        site.swap(deploy_id)
        self.releases.serve_as(host, site)
        if start is not None:
            self.releases.run(site.release(deploy_id))
        return site

    @contextlib.asynccontextmanager
    async def served(self, **more: str) -> AsyncIterator[Self]:
        """Serves the folder with Caddy. `more` are further settings."""
        settings = Settings(apps_listen="127.0.0.1:0", apps_domain=DOMAIN, data_dir=str(self.folder), **more)
        server = caddy.Caddy(settings, self.folder)
        try:
            await server.start(socket.create_server(("127.0.0.1", 0), backlog=4_096))
            self.port = urlsplit(caddy.read_address(self.folder)).port or 0
            yield self
        finally:
            await server.stop()

    def worker(self, redis_url: str) -> Worker:
        """Returns a worker that serves the folder as in production, at no other port than this."""
        settings = {"GATEWAY_DATA_DIR": str(self.folder), "GATEWAY_APPS_LISTEN": f"127.0.0.1:{self.port}"}
        settings["GATEWAY_ALLOW_PRIVATE_ADDRESSES"] = ""
        # Most tests have no records of their apps in Redis, so their addresses would be removed.
        constants = {"workers.engine.reconciler.TIDY_SECONDS": 3_600.0}
        return Worker(redis_url, self.folder, "sites", constants=constants, **settings)

    def runs(self, site: Site) -> bool:
        return site.current is not None and (site.release(site.current) / "start").exists()

    async def ask(self, target: str, *headers: str, host: str | None = HOST, method: str = "GET") -> "Said":
        """Sends one request unchanged."""
        lines = [f"{method} {target} HTTP/1.1", *([] if host is None else [f"Host: {host}"]), *headers]
        return await self.say("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1"))

    async def say(self, data: bytes) -> "Said":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(20):
                writer.write(data)
                return Said(await reader.read())
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Said:
    """A response as it was received."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split(" ")[1]) if first else 0  # 0: closed without a response
        pairs = [line.partition(": ") for line in lines]
        self.headers = {name.lower(): value for name, _, value in pairs}
        self.names = [name.lower() for name, _, _ in pairs]

    @property
    def kept(self) -> tuple[int, bytes, dict[str, str]]:
        """The parts that must be the same for each server."""
        ours = ("content-type", "content-range", "cache-control", "x-content-type-options", "location", "allow")
        body = self.body if self.status in (200, 206) else b""
        return self.status, body, {name: self.headers[name] for name in ours if name in self.headers}


async def swapped_under_load(
    hosting: Hosting, site: Site, deploys: tuple[str, str], paths: list[str], texts: set[str], *, swaps: int
) -> None:
    """Swaps to the second deploy and back during requests. Every response must be complete and one of the texts."""
    host = next(path.name for path in (hosting.folder / "addresses").iterdir() if path.resolve() == site.folder)
    url, seen, over = f"http://127.0.0.1:{hosting.port}", dict.fromkeys(texts, 0), False

    async def visitor(client: aiohttp.ClientSession, number: int) -> None:
        while not over:
            number += 1
            path = paths[number % len(paths)]
            async with client.get(url + path, headers={"Host": host}) as answer:
                text = await answer.text()
                assert answer.status == 200, (path, text)
                seen[text] += 1

    async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
        for number in range(16):
            group.create_task(visitor(client, number))
        for _ in range(swaps):
            for swap in (site.undo, site.swap):
                swap(deploys[1])
                before = sum(seen.values())
                while sum(seen.values()) < before + 40:
                    await asyncio.sleep(0.002)
        over = True
    assert min(seen.values()) > 10 * swaps, seen
