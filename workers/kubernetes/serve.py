"""Serves a release in the container `web` of a pod (`pod.py`), with the Caddyfile of a single machine."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from gateway.settings import Settings
from workers.hosting import caddy
from workers.hosting.releases import PREVIOUS_SECONDS, Releases, Site
from workers.hosting.watchdog import PORT
from workers.kubernetes.pod import DATA_PORT, FOLDER, RELAY_PORT, WEB_PORT, PodRelease, start_address

SITE = "app"  # the name of the only site, in place of a host name: the Ingress decides which names lead here


def lay_out(folder: Path, release: PodRelease) -> Site:
    """Returns the site of the release, whose folder may not exist yet."""
    releases = Releases(folder)
    releases.create_folders()
    site = releases.site(release.account, release.app, release.address)
    releases.serve_as(SITE, site)
    return site


def serve(
    release: PodRelease,
    *,
    folder: Path = FOLDER,
    port: int = WEB_PORT,
    host: str = "::",
    app_port: int = PORT,
    relay_port: int = RELAY_PORT,
) -> NoReturn:
    """Becomes Caddy, or a smaller process that runs Caddy and the relay (`web.py`)."""
    site = lay_out(folder, release)
    own = folder / "caddy"
    own.mkdir(mode=0o700, exist_ok=True)
    for leftover in own.glob("*.sock"):
        leftover.unlink()
    configuration = own / "Caddyfile"
    recent_until = site.swapped_at + PREVIOUS_SECONDS
    text = caddy.render_configuration(
        Settings(trusted_proxies="private"), name=SITE, admin="off", recent_until=recent_until, visits=""
    )
    configuration.write_text(text)
    with caddy.open_listener(host, port) as listener:
        os.dup2(listener.fileno(), 0)  # `bind fd/0`
    os.chdir(folder)
    words = [caddy.find_binary(), "run", "--config", str(configuration), "--adapter", "caddyfile"]
    if release.runs:
        path = folder / "running" / f"{release.deploy}.sock"
        ports = f"{relay_port},{port},{DATA_PORT}"
        relay = [str(path), str(app_port), start_address(release)[1:], ports]
        words = [sys.executable, "-IS", "-c", _WEB, *relay, *words]
    os.execve(words[0], words, caddy.environment(own))  # noqa: S606


# Not `-m`: an installed service adds the folder of its packages only to its own path.
_WEB = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r});"
    " from workers.kubernetes.web import main; main()"
)
