"""Takes the release of a pod from the worker `sites` (`pods.py`), in the pod's first container (`pod.py`)."""

import asyncio
import hmac
from pathlib import Path

from aiohttp import web

from gateway.deploys.release import ReleaseArchive
from workers.engine.app_data import AppData
from workers.hosting import archives, caddy
from workers.hosting.archive_files import BadArchive
from workers.hosting.releases import Releases, Site
from workers.kubernetes.pod import FOLDER, RECEIVE_PORT, PodRelease
from workers.kubernetes.serve import lay_out
from workers.kubernetes.volume import prepare_volume
from workers.sandbox.keeper import measure_disk
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import MIB

PREVIOUS_FILES_BYTES = 256 * MIB  # of the previous release's files, at most; a pod keeps them until it ends


async def receive(
    release: PodRelease, token: str, *, folder: Path = FOLDER, port: int = RECEIVE_PORT, host: str = "::"
) -> None:
    """Waits until the release is here. Whoever knows the token sends it: `PUT /release`, the archive as the body.

    Before it, `PUT /previous/{deploy}?digest=…` may send the release that visitors have had so far: pages that were
    opened before the swap load its files. The answer is 204, or 401 for another token, or 409 for what is not the
    expected archive.
    """
    if release.keeps_data:
        await asyncio.to_thread(prepare_volume, AppData(folder, release.app))
    site = await asyncio.to_thread(lay_out, folder, release)
    if site.current == release.deploy:  # the pod was started again on the same node
        return
    received, receiving = asyncio.Event(), asyncio.Lock()

    async def take(request: web.Request) -> web.Response:
        check_token(request, token)
        if request.content_length != release.archive.size:
            raise web.HTTPConflict(text=f"the archive has {release.archive.size} bytes\n")
        async with receiving:
            if not received.is_set():
                await _store(request, site, release.deploy, release.archive)
                if release.runs:
                    Releases(folder).run(site.release(release.deploy))
                site.swap(release.deploy)
                received.set()
        return web.Response(status=204)

    async def take_previous(request: web.Request) -> web.Response:
        check_token(request, token)
        deploy = request.match_info["deploy"]
        archive = ReleaseArchive(request.query.get("digest", ""), request.content_length or 0)
        async with receiving:
            if not received.is_set() and deploy != release.deploy:
                await _store(request, site, deploy, archive)
                await asyncio.to_thread(_keep_files, site.release(deploy))
                site.swap(deploy)
        return web.Response(status=204)

    application = web.Application(client_max_size=0)
    application.router.add_put("/release", take)
    application.router.add_put("/previous/{deploy:dep_[0-9a-z]+}", take_previous)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=5)
    await runner.setup()
    try:
        await web.SockSite(runner, caddy.open_listener(host, port)).start()
        await received.wait()
    finally:
        await runner.cleanup()


def check_token(request: web.Request, token: str) -> None:
    """Raises HTTPUnauthorized for another token, and for an empty one."""
    given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
    if not token or not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise web.HTTPUnauthorized


async def _store(request: web.Request, site: Site, deploy: str, archive: ReleaseArchive) -> None:
    packed, fresh = site.folder.parent / "received.tar.gz", site.folder.parent / "received"
    await asyncio.to_thread(remove_folder, fresh)
    fresh.mkdir(mode=0o755)
    try:
        with packed.open("wb") as file:
            async for chunk in request.content.iter_any():
                file.write(chunk)
        await archives.unpack(packed, archive, fresh)
    except BadArchive as error:
        raise web.HTTPConflict(text=f"{error}\n") from None
    finally:
        packed.unlink(missing_ok=True)
    await asyncio.to_thread(remove_folder, site.release(deploy))
    fresh.rename(site.release(deploy))


def _keep_files(previous: Path) -> None:
    """Removes what no page loads: all but the files of the release, and those too if they are large."""
    for path in previous.iterdir():
        if not path.is_dir():
            path.unlink()
        elif path.name != "files" or measure_disk(path) > PREVIOUS_FILES_BYTES:
            remove_folder(path)
