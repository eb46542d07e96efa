"""Runs nginx (1.19.5 or newer) in front of `web.py`. nginx sends files and proxies everything else to `web.py`.

The configuration never changes, because the path that nginx opens leads to the current release. So a swap needs no
reload, and no request fails: when a file disappears between nginx's check and its opening, nginx asks `web.py`.
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

from workers.hosting.limits import APP_REQUESTS, APP_WAITING, open_files
from workers.hosting.web import TEXT_TYPES, TYPES

logger = structlog.get_logger()

DRAIN = 10.0  # seconds for answers in progress at a stop
FORMER_DRAIN = 2.0  # the same for a former nginx, while the port is not served
START_SECONDS = 10.0
# In progress at one address, slow readers of files included; more get 503. What passes finds room in `web.py`.
HOST_REQUESTS = APP_REQUESTS + APP_WAITING

CONFIGURATION = """\
daemon off;
{user}
worker_processes auto;
pid "{web}/nginx.pid";
error_log stderr error;
worker_rlimit_nofile {files};
events {{ worker_connections {connections}; }}
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
    client_header_timeout 15s;
    client_body_timeout 30s;
    send_timeout 60s;
    keepalive_timeout 60s;
    reset_timedout_connection on;
    limit_conn_zone $host zone=hosts:16m;
    limit_conn hosts {host_requests};
    limit_conn_status 503;
    limit_conn_log_level info;
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
        error_page 503 @busy;
        set $robots '';
        if (-e "{folder}/addresses/$host/noindex") {{ set $robots noindex; }}
        if (!-e "{folder}/addresses/$host/current") {{ return 404 "There is no app at this address.\n"; }}
        if ($request !~ "^\\S+ +/") {{ return 400; }}
        location / {{
            add_header Cache-Control no-cache;
            add_header X-Content-Type-Options nosniff;
            add_header X-Robots-Tag $robots;
            disable_symlinks on from=$document_root;
            try_files $file @apps;
        }}
        location ~ /\\.(?!well-known/) {{ return 404; }}
        location @busy {{
            add_header Retry-After 1 always;
            default_type text/plain;
            return 503 "The app has too many requests in progress.\n";
        }}
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
            proxy_set_header Forwarded "";
            proxy_set_header X-Real-IP "";
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $seen_scheme;
        }}
    }}
}}
"""


def is_usable(folder: Path) -> bool:
    """True when nginx is installed, is new enough for `-e`, and can reach the folder as its own user."""
    if (binary := _find_binary()) is None:
        return False
    output = subprocess.run([binary, "-v"], capture_output=True, text=True, timeout=10, check=False).stderr  # noqa: S603
    version = re.search(r"nginx/(\d+)\.(\d+)\.(\d+)", output)
    if version is None or tuple(map(int, version.groups())) < (1, 19, 5):
        return False
    passable = all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))
    return passable or os.geteuid() != 0


def _find_binary() -> str | None:
    return shutil.which("nginx", path=os.pathsep.join([*os.get_exec_path(), "/usr/sbin", "/usr/local/sbin"]))


def render_configuration(folder: Path, host: str, port: int) -> str:
    if any(c in str(folder) for c in '"$\\;{}\n'):
        raise ValueError(f"nginx can't use a folder with this name: {folder}")
    files = open_files(hard=True)
    return CONFIGURATION.format(
        files=files,
        connections=files // 2,  # a connection of a visitor may have a file open
        host_requests=min(HOST_REQUESTS, files // 16),  # each may take a connection to `web.py` too
        user=_user_directive() if os.geteuid() == 0 else "",
        web=folder / "web",
        folder=folder,
        types=" ".join(f"{kind} {ending.lstrip('.')};" for ending, kind in sorted(TYPES.items())),
        texts=" ".join(sorted(TEXT_TYPES - {"text/html"})),  # nginx includes it by default
        host=f"[{host}]" if ":" in host else host,
        port=port,
    )


def _user_directive() -> str:
    """The name of nobody's group depends on the distribution."""
    nobody = pwd.getpwnam("nobody")
    return f"user {nobody.pw_name} {grp.getgrgid(nobody.pw_gid).gr_name};"


@asynccontextmanager
async def serve(folder: Path, host: str, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs nginx in front of the socket `web/apps.sock` in the folder."""
    binary = _find_binary()
    if binary is None:
        raise RuntimeError("GATEWAY_APPS_SERVER is nginx, but nginx is not installed")
    file, pid_file = folder / "web" / "nginx.conf", folder / "web" / "nginx.pid"
    file.write_text(render_configuration(folder, host, port))
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
    """nginx writes its process id to the file once it listens."""
    ends = time.monotonic() + START_SECONDS
    while _read_pid(pid_file) != nginx.pid:
        if nginx.returncode is not None or time.monotonic() > ends:
            raise RuntimeError("nginx did not start; its error is in the log above")
        await asyncio.sleep(0.02)


async def stop_former(folder: Path) -> None:
    """Stops the nginx of a worker that was killed. It still serves and holds the port."""
    ends, stop_signal = time.monotonic() + FORMER_DRAIN, signal.SIGQUIT
    while left := _find_former(folder):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, stop_signal)
        await asyncio.sleep(0.05)
        if stop_signal is signal.SIGQUIT and time.monotonic() > ends:
            logger.info("nginx.cut_off", pids=left)
            stop_signal = signal.SIGTERM


def _find_former(folder: Path) -> list[int]:
    """Its process ids. nginx's workers continue even if their master was killed."""
    found = {}
    if (group := _read_pid(folder / "web" / "nginx.pid")) is not None:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                if command.startswith(b"nginx: ") and os.getpgid(int(name)) == group:
                    found[int(name)] = command
    if group in found and os.fsencode(folder) not in found[group]:
        return []  # another nginx has this process id by now
    return list(found)


def _read_pid(pid_file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(pid_file.read_text())
    return None
