"""Runs the start command in the container `app` of a pod (`pod.py`)."""

import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from workers.engine.app_data import AppData
from workers.hosting.releases import Releases
from workers.hosting.watchdog import LIMITS, PORT, make_command
from workers.kubernetes.pod import FOLDER, PodRelease, start_address
from workers.kubernetes.volume import wait_for_data
from workers.sandbox.keeper import STOPPED_STATUS
from workers.sandbox.sandbox import APP, APP_USERS, DATA, TMP, Sandbox

WEB_SECONDS = 60.0  # in which `web` must listen, before the command starts
RETRY_SECONDS = 0.05


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
