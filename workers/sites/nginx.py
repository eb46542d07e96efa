"""nginx (1.19.5 or newer) in front of `web.py`, on machines that have it: it sends the files, and asks for all else.

Its configuration never changes: which release is served stands in the path that it opens. So a swap needs no reload,
and no request meets one: a file that goes between the look for it and its opening is asked for there too.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from workers.sites.web import TEXTS, TYPES

logger = structlog.get_logger()

DRAIN = 10.0  # seconds that running answers get
FORMER_DRAIN = 2.0  # while nobody listens
START = 10.0

CONFIGURATION = """\
daemon off;
{user}
worker_processes auto;
pid "{web}/nginx.pid";
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
    types_hash_max_size 4096;
    types {{ {types} }}
    default_type application/octet-stream;
    charset utf-8;
    charset_types {texts};
    access_log off;
    log_not_found off;
    server_tokens off;
    sendfile on;
    tcp_nopush on;
    gzip on;
    gzip_vary on;
    gzip_types text/css text/plain text/javascript application/json application/wasm image/svg+xml;
    client_body_temp_path "{web}/body";
    proxy_temp_path "{web}/proxy";
    fastcgi_temp_path "{web}/fastcgi";
    uwsgi_temp_path "{web}/uwsgi";
    scgi_temp_path "{web}/scgi";
    map $uri $file {{ "~/$" "${{uri}}index.html"; default $uri; }}
    map $http_upgrade $next_connection {{ default upgrade; '' ''; }}
    map $http_x_forwarded_proto $seen_scheme {{ default $http_x_forwarded_proto; '' $scheme; }}
    upstream apps {{ server "unix:{web}/apps.sock"; keepalive 64; }}
    server {{
        listen {host}:{port};
        root "{folder}/addresses/$host/current/files";
        client_max_body_size 0;
        error_page 403 404 405 = @apps;
        if ($request !~ "^\\S+ +/") {{ return 400; }}
        location / {{
            add_header Cache-Control no-cache;
            add_header X-Content-Type-Options nosniff;
            try_files $file @apps;
        }}
        location ~ /\\.(?!well-known/) {{ return 404; }}
        location @apps {{
            charset off;
            proxy_pass http://apps;
            proxy_http_version 1.1;
            proxy_buffering off;
            proxy_request_buffering off;
            proxy_read_timeout 300s;
            proxy_send_timeout 300s;
            proxy_redirect off;
            proxy_ignore_headers X-Accel-Redirect X-Accel-Expires X-Accel-Limit-Rate X-Accel-Buffering X-Accel-Charset;
            proxy_set_header Host $http_host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $next_connection;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $seen_scheme;
        }}
    }}
}}
"""


def usable(folder: Path) -> bool:
    """Where it is installed, new enough for `-e`, and its user can pass to the folder."""
    if (binary := _binary()) is None:
        return False
    told = subprocess.run([binary, "-v"], capture_output=True, text=True, timeout=10, check=False).stderr  # noqa: S603
    version = re.search(r"nginx/(\d+)\.(\d+)\.(\d+)", told)
    if version is None or tuple(map(int, version.groups())) < (1, 19, 5):
        return False
    passable = all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))
    return passable or os.geteuid() != 0


def _binary() -> str | None:
    return shutil.which("nginx", path=os.pathsep.join([*os.get_exec_path(), "/usr/sbin", "/usr/local/sbin"]))


def configuration(folder: Path, host: str, port: int) -> str:
    if any(c in str(folder) for c in '"$\\;{}\n'):
        raise ValueError(f"nginx can't be given a folder of this name: {folder}")
    return CONFIGURATION.format(
        user=_user() if os.geteuid() == 0 else "",
        web=folder / "web",
        folder=folder,
        types=" ".join(f"{kind} {ending.lstrip('.')};" for ending, kind in sorted(TYPES.items())),
        texts=" ".join(sorted(TEXTS - {"text/html"})),  # which it has by itself
        host=f"[{host}]" if ":" in host else host,
        port=port,
    )


def _user() -> str:
    """What the group is called is the distribution's."""
    nobody = pwd.getpwnam("nobody")
    return f"user {nobody.pw_name} {grp.getgrgid(nobody.pw_gid).gr_name};"


@asynccontextmanager
async def serving(folder: Path, host: str, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """In front of the socket `web/apps.sock` in the folder."""
    binary = _binary()
    if binary is None:
        raise RuntimeError("nginx is not installed, and GATEWAY_APPS_SERVER asks for it")
    file, pid_file = folder / "web" / "nginx.conf", folder / "web" / "nginx.pid"
    file.write_text(configuration(folder, host, port))
    nginx = await asyncio.create_subprocess_exec(
        *(binary, "-c", file, "-p", folder / "web", "-e", "stderr"),
        stdin=asyncio.subprocess.DEVNULL,
        env={"PATH": os.defpath},
        start_new_session=True,
    )
    try:
        await _until_ready(nginx, pid_file)
        yield nginx
    finally:
        if nginx.returncode is None:
            nginx.send_signal(signal.SIGQUIT)
            try:
                async with asyncio.timeout(DRAIN):
                    await nginx.wait()
            except TimeoutError:
                nginx.terminate()
                await nginx.wait()


async def _until_ready(nginx: asyncio.subprocess.Process, pid_file: Path) -> None:
    """It writes its id down when it has the port."""
    ends = time.monotonic() + START
    while _pid(pid_file) != nginx.pid:
        if nginx.returncode is not None or time.monotonic() > ends:
            raise RuntimeError("nginx did not start; its last words are above")
        await asyncio.sleep(0.02)


async def end_former(folder: Path) -> None:
    """One whose worker was killed served on, and has the port."""
    ends, how = time.monotonic() + FORMER_DRAIN, signal.SIGQUIT
    while left := _former(folder):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        await asyncio.sleep(0.05)
        if how is signal.SIGQUIT and time.monotonic() > ends:
            logger.info("nginx.cut_off", pids=left)
            how = signal.SIGTERM


def _former(folder: Path) -> list[int]:
    """Its processes: workers go on when their master was killed."""
    found = {}
    if (group := _pid(folder / "web" / "nginx.pid")) is not None:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes()
                if words.startswith(b"nginx: ") and os.getpgid(int(name)) == group:
                    found[int(name)] = words
    if group in found and os.fsencode(folder) not in found[group]:
        return []  # the number is another nginx's by now
    return list(found)


def _pid(pid_file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(pid_file.read_text())
    return None
