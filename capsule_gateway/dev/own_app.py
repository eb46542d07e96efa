"""The developer's own app of `capsule dev DIR`: its [dev] command runs outside the sandbox, at the app's address.

Caddy serves it as a release of the app, whose socket leads to the command's port. A release that was served before is
served again afterwards. So is one that is published meanwhile, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from capsule_gateway.dev.account import DemoApp
from capsule_gateway.dev.children import DevProcess, run_shell
from capsule_gateway.dev.key_file import Keys
from capsule_gateway.dev.layout import Layout
from gateway.cancellation import RunningTasks

if TYPE_CHECKING:
    from workers.hosting.releases import Releases

RELEASE = "dev"  # no deploy has this id
GRACE_SECONDS = 5.0
IDLE_SECONDS = 300.0  # without a byte in either direction, after which a connection ends, as for hosted apps
# The command gets the variables of the terminal, but not those of the service.
SERVICE_VARIABLES = ("GATEWAY_", "CAPSULE_")


@asynccontextmanager
async def run_own_app(layout: Layout, keys: Keys, record: DemoApp) -> AsyncIterator[DevProcess]:
    """Runs the command of the layout's own app, and serves it at the app's address until the block ends."""
    from workers.hosting.releases import Releases

    own = layout.own_app
    assert own
    data = layout.folder / "apps" / own.name
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    releases = Releases(layout.data_dir)
    releases.create_folders()
    variables = {
        "HOST": "127.0.0.1",
        "PORT": str(layout.own_port),
        "DATA_DIR": str(data),
        "APP_URL": layout.address,
        "VITE_SERVICE_AI_URL": layout.ai,
        "BETTER_AUTH_SECRET": os.environ.get("BETTER_AUTH_SECRET") or keys.session_secret,
    }
    environment = inherit_environment(layout.data_dir) | variables
    log = layout.logs / "app.log"
    name = f"app {own.name}"
    async with run_shell(
        name, own.command, folder=own.folder, log=log, grace=GRACE_SECONDS, environment=environment
    ) as child:
        with _serve_release(releases, layout, record) as listener:
            async with _relay_connections(listener, layout.own_port):
                yield child


def inherit_environment(data_dir: Path) -> dict[str, str]:
    """Returns the terminal's variables. If its Node.js is too old for apps, the one of builds comes first."""
    from workers.sandbox.sandbox import COPIES
    from workers.sandbox.tools import find_node

    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SERVICE_VARIABLES)}
    path = inherited.get("PATH", os.defpath)
    node = find_node(path, data_dir / COPIES)
    return inherited | {"PATH": f"{node}{os.pathsep}{path}" if node else path}


@contextmanager
def _serve_release(releases: Releases, layout: Layout, record: DemoApp) -> Iterator[socket.socket]:
    """Yields the listener of the release's socket, to which Caddy connects."""
    from workers.hosting.releases import Site
    from workers.sandbox.removal import remove_folder

    site = Site(releases.folder / "releases" / record.id / "live")
    for folder in (site.folder.parent, site.folder):
        folder.mkdir(mode=0o711, exist_ok=True)
    (site.folder.parent / "account").write_text(record.account)
    release = site.release(RELEASE)
    (release / "app").mkdir(mode=0o755, parents=True)
    try:
        with _listen(release / "sock") as listener:
            site.swap(RELEASE)
            releases.serve_as(layout.host, site)
            yield listener
    finally:
        site.undo(RELEASE)
        remove_folder(release)


def remove_leftovers(data_dir: Path) -> None:
    """Removes the release of a run that was killed, and serves the one before."""
    from workers.hosting.releases import Site
    from workers.sandbox.removal import remove_folder

    for release in data_dir.glob(f"releases/*/live/{RELEASE}"):
        Site(release.parent).undo(RELEASE)
        remove_folder(release)


def _listen(path: Path) -> socket.socket:
    """Creates a Unix socket to which only this user and Caddy can connect."""
    from workers.hosting.caddy import connectable
    from workers.sandbox.keeper import CADDY_USER

    listener = socket.socket(socket.AF_UNIX)
    with connectable(path) as short:
        listener.bind(short)
    path.chmod(0o600)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a root that cannot change users runs Caddy itself
            os.chown(path, CADDY_USER, CADDY_USER)
    return listener


@asynccontextmanager
async def _relay_connections(listener: socket.socket, port: int) -> AsyncIterator[None]:
    from workers.sandbox.network import abort, splice

    running = RunningTasks()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # By name, because a command that listens on `localhost` may listen on ::1 alone.
            await splice((reader, writer), await asyncio.open_connection("localhost", port), IDLE_SECONDS)
        except OSError:  # Caddy answers that the app does not
            abort(writer)

    server = await asyncio.start_unix_server(
        lambda reader, writer: running.start(connect(reader, writer)), sock=listener
    )
    try:
        yield
    finally:
        server.close()
        await running.cancel()
