"""What runs in the pod of an app: one container for each role (`objects.py`, `roles.py`).

    receive   waits for the release, which the worker `sites` sends, and ends (`receive.py`)
    web       runs Caddy as a single machine does, and the relay to the app (`serve.py`, `web.py`)
    run       runs the start command under a keeper, whose exit status is the command's (`start.py`)
    data      keeps the data of the app (`data_pod.py`)

The pod is the sandbox. It has no credentials: it sends nothing to the service, and the one secret that a container has
is for that container alone.

The start command may change what the container `run` can write to, so that container has only the releases, read-only.
The relay is in `web`, because it cleans the app's responses. `run` waits until `web` listens, and `web` keeps its port
while Caddy fails (`web.py`), so the app cannot take visitors' requests itself.
"""

from pathlib import Path

import msgspec

from gateway.deploys.release import ReleaseArchive

FOLDER, SECRETS = Path("/capsule"), Path("/capsule-secrets")
# Not usual ones: a start command may listen at others than $PORT.
WEB_PORT, RECEIVE_PORT, DATA_PORT = 61080, 61081, 61082
RELAY_PORT = RECEIVE_PORT  # where the relay answers the worker; it is free by then
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
    alone: bool = False  # whether it must not run beside another release

    @property
    def keeps_data(self) -> bool:
        """Whether the start command has data that stay."""
        return self.runs and self.address == "live"

    def excludes(self, other: "PodRelease") -> bool:
        """Returns whether the two work with the same data, and one of them must not run beside another release."""
        return self.keeps_data and other.keeps_data and (self.alone or other.alone)


def start_address(release: PodRelease) -> str:
    """Returns where `run` tells `web` that the app starts: a Unix socket of the pod's network, without a file."""
    return f"\0capsule-{release.deploy}"
