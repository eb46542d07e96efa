"""What runs in the pod of an app: one container for each role (`objects.py`, `roles.py`).

    receive   waits for the release, which the worker `sites` sends, and ends (`receive.py`)
    web       runs Caddy, with the Caddyfile of a single machine (`workers/hosting/Caddyfile`), and the relay to the app
    run       runs the start command under a keeper, whose exit status is the command's
    data      keeps the data of the app (`data_pod.py`)

The pod is the sandbox. It has no credentials: it sends nothing to the service, and the one secret that a container has
is for that container alone.

The start command may change what the container `run` can write to, so that container has only the releases, read-only.
The relay is in `web`, because it cleans the app's responses. `run` waits until `web` listens, and `web` keeps its port
while Caddy fails (`web.py`), so the app cannot take visitors' requests itself.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from gateway.deploys.release import ReleaseArchive
from gateway.settings import Settings
from workers.hosting import caddy
from workers.hosting.data import AppData
from workers.hosting.releases import Releases, Site
from workers.hosting.watchdog import LIMITS, PORT, make_command
from workers.kubernetes.volume import wait_for_data
from workers.sandbox.keeper import STOPPED_STATUS
from workers.sandbox.sandbox import APP, APP_USERS, DATA, TMP, Sandbox

FOLDER, SECRETS = Path("/capsule"), Path("/capsule-secrets")
WEB_PORT, RECEIVE_PORT, DATA_PORT = (
    61080,
    61081,
    61082,
)  # not usual ones: a start command may listen at others than $PORT
IDLE_PORT = RECEIVE_PORT  # which is free by then
SITE = "app"  # the name of the only site, in place of a host name: the Ingress decides which names lead here
WEB_SECONDS = 60.0  # in which `web` must listen, before the command starts
RETRY_SECONDS = 0.05
TOKEN, VARIABLES = "token", "variables"  # files in `SECRETS`


class PodRelease(msgspec.Struct, frozen=True):
    """What a pod serves. The containers get it as JSON in the variable CAPSULE_POD; nothing in it is secret."""

    account: str
    app: str  # id
    address: str
    deploy: str
    archive: ReleaseArchive
    url: str  # the address, as the start command gets it in APP_URL
    runs: bool = False  # whether the start command runs here
    suspended: bool = False
    alone: bool = False  # whether it must not run beside another release

    @property
    def keeps_data(self) -> bool:
        """Whether the start command has data that stay."""
        return self.runs and self.address == "live"


def start_address(release: PodRelease) -> str:
    """Returns where `run` tells `web` that the app starts: a Unix socket of the pod's network, without a file."""
    return f"\0capsule-{release.deploy}"


def lay_out(folder: Path, release: PodRelease) -> Site:
    """Returns the site of the release, whose folder may not exist yet."""
    releases = Releases(folder)
    releases.create_folders()
    site = releases.site(release.account, release.app, release.address)
    releases.serve_as(SITE, site)
    return site


# -- web -----------------------------------------------------------------------------------------------------


def serve(
    release: PodRelease,
    *,
    folder: Path = FOLDER,
    port: int = WEB_PORT,
    host: str = "::",
    app_port: int = PORT,
    idle_port: int = IDLE_PORT,
) -> NoReturn:
    """Becomes Caddy, or a smaller process that runs Caddy and the relay (`web.py`)."""
    site = lay_out(folder, release)
    site.set_suspended(suspended=release.suspended)
    own = folder / "caddy"
    own.mkdir(mode=0o700, exist_ok=True)
    for leftover in own.glob("*.sock"):
        leftover.unlink()
    configuration = own / "Caddyfile"
    text = caddy.render_configuration(Settings(trusted_proxies="private"), name=SITE, admin="off")
    configuration.write_text(text)
    with caddy.open_listener(host, port) as listener:
        os.dup2(listener.fileno(), 0)  # `bind fd/0`
    os.chdir(folder)
    words = [caddy.find_binary(), "run", "--config", str(configuration), "--adapter", "caddyfile"]
    if release.runs and not release.suspended:
        path = folder / "running" / f"{release.deploy}.sock"
        words = [
            sys.executable,
            "-IS",
            "-c",
            _WEB,
            str(path),
            str(app_port),
            start_address(release)[1:],
            str(idle_port),
            *words,
        ]
    os.execve(words[0], words, caddy.environment(own))  # noqa: S606


# Not `-m`: an installed service adds the folder of its packages only to its own path.
_WEB = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r});"
    " from workers.kubernetes.web import main; main()"
)


# -- run -----------------------------------------------------------------------------------------------------


def run(
    release: PodRelease,
    variables: Mapping[str, str],
    *,
    folder: Path = FOLDER,
    app: Path = Path(APP),
    scratch: Path = Path(TMP),
    mounted: Path = Path(DATA),
    port: int = PORT,
) -> NoReturn:
    """Becomes the keeper of the start command. It ends with the command's status: 128 and the number of a signal."""
    sandbox = Sandbox(development=True, users=APP_USERS, trusted=True)
    sandbox.check(scratch)  # finds Node.js and Python
    site = Releases(folder).site(release.account, release.app, release.address)
    start = (site.release(release.deploy) / "start").read_text()
    limits = msgspec.structs.replace(LIMITS, memory=0, disk=0)  # the pod has its own
    command = make_command(start, app, sandbox, {**variables, "APP_URL": release.url}, limits)
    environment = {**command.environment, "PORT": str(port)}
    command = msgspec.structs.replace(command, environment=environment, places={app: APP}, secrets=variables)
    if release.keeps_data:
        data = AppData(folder, release.app)
        command = msgspec.structs.replace(command, data=data.folder, locks=[wait_for_data(data)])
        if not data.files.samefile(mounted):  # the files were replaced since this container started
            sys.exit(STOPPED_STATUS)
    _announce_start(release)
    sandbox.become_keeper(command)


def _announce_start(release: PodRelease) -> None:
    """Waits until `web` listens, and tells it that the app starts. Raises OSError."""
    ends = time.monotonic() + WEB_SECONDS
    with socket.socket(socket.AF_UNIX) as connection:
        while True:
            try:
                return connection.connect(start_address(release))
            except ConnectionRefusedError:
                if time.monotonic() > ends:
                    raise
            time.sleep(RETRY_SECONDS)
