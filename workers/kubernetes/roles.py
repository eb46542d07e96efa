"""Runs a container of an app's pod (`pod.py`). Each imports only what its role needs, because each starts a process."""

import asyncio
import os
import sys

import msgspec

from workers.engine.app_data import AppData
from workers.kubernetes.pod import FOLDER, SECRETS, TOKEN, VARIABLES, PodRelease


def main() -> None:
    """Runs the role that the command line names, with `PodRelease` in the variable CAPSULE_POD.

    The secrets are a token, and the variables of the start command as a JSON object of texts.
    """
    release = msgspec.json.decode(os.environ["CAPSULE_POD"], type=PodRelease)
    match sys.argv[1]:
        case "receive":
            from workers.kubernetes.receive import receive

            asyncio.run(receive(release, (SECRETS / TOKEN).read_text()))
        case "web":
            from workers.kubernetes.serve import serve

            serve(release)
        case "run":
            from workers.kubernetes.start import run

            run(release, msgspec.json.decode((SECRETS / VARIABLES).read_bytes(), type=dict[str, str]))
        case "data":
            from workers.kubernetes.data_pod import run as run_data

            run_data(AppData(FOLDER, release.app), SECRETS / TOKEN)
        case role:
            sys.exit(f"There is no role {role!r}.")
