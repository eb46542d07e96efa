"""Checks the machine: disks, files, limits, the sandbox and Caddy."""

import asyncio
import os
import resource
import secrets
import shutil
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from urllib.parse import parse_qs, urlsplit

from gateway.errors import StorageUnavailable
from gateway.settings import Settings, find_temporary_fault
from gateway.storage import closed_folders, open_storage
from workers.doctor.row import Row, State, judge_use
from workers.hosting import caddy
from workers.hosting.caddy import NoCaddy
from workers.sandbox import cgroups
from workers.sandbox.machine import Unsafe
from workers.sandbox.sandbox import APP_USERS, open_sandbox

LEAST_FREE_BYTES = 1 << 30
LEAST_DESCRIPTORS = 16_384
RAISE_DESCRIPTORS = "raise the hard limit, for example with LimitNOFILE=65536 in systemd or ulimits in compose.yaml"


async def check_storage(settings: Settings) -> AsyncIterator[Row]:
    storage, probe, present = open_storage(settings), f"doctor-{secrets.token_hex(4)}", _find_folder(settings)
    action = "see the line above" if settings.storage_url else "make this user the owner of GATEWAY_DATA_DIR"
    try:
        await storage.put(probe, b"")
        await storage.delete([probe])
        yield Row("storage", "ok", "can be written")
    except StorageUnavailable as error:
        cause = error.__cause__
        detail = f"cannot be written: {(isinstance(cause, OSError) and cause.strerror) or type(cause).__name__}"
        yield Row("storage", "fail", detail, action)
    _remove_new_folders(settings, present)
    space = await asyncio.to_thread(shutil.disk_usage, present)
    if not space.total:
        action = "watch its space yourself, or move GATEWAY_DATA_DIR to a disk of this machine"
        yield Row("disk", "warn", "the file system does not say how large it is", action)
        return
    state, detail, _ = judge_use(space.total - space.free, space.total, "")
    if state == "ok" and space.free < LEAST_FREE_BYTES:
        state = "warn"
    yield Row("disk", state, detail, "" if state == "ok" else "free space, or move GATEWAY_DATA_DIR to a larger disk")


def _find_folder(settings: Settings) -> Path:
    """Returns the data folder, or before the first start the nearest folder above it."""
    folder = Path(settings.data_dir).absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _remove_new_folders(settings: Settings, present: Path) -> None:
    """Removes the folders down to `present` that only this check has made."""
    folder = Path(settings.data_dir).absolute()
    with suppress(OSError):
        while folder != present:
            folder.rmdir()
            folder = folder.parent


async def check_temporary_files(settings: Settings) -> AsyncIterator[Row]:
    if fault := find_temporary_fault():
        yield Row("temporary files", "fail", fault, "create the folder for this user, or unset the variable")
    else:
        yield Row("temporary files", "ok", gettempdir())


async def check_open_files(settings: Settings) -> AsyncIterator[Row]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        yield Row("open files", "ok", "no limit")
    elif hard < LEAST_DESCRIPTORS:
        detail = f"a process may open {hard:,} files and connections, and should be able to open {LEAST_DESCRIPTORS:,}"
        yield Row("open files", "warn", detail, RAISE_DESCRIPTORS)
    else:
        yield Row("open files", "ok", f"a process may open {hard:,} files and connections")


# -- files with secrets --------------------------------------------------------------------------------------


async def check_secret_files(settings: Settings) -> AsyncIterator[Row]:
    """Checks that only this user can read `.env` and the files with keys."""
    faulty = False
    for path in _list_secret_files(settings):
        try:
            fault = await asyncio.to_thread(_find_reader, path)
        except OSError as error:
            faulty = True
            yield Row("secret files", "fail", f"{path}: {error.strerror}", "create the file, or correct its name")
        else:
            if fault:
                faulty = True
                yield Row("secret files", "warn", f"{path}: {fault}", f"chmod o= {path}")
    if not faulty:
        yield Row("secret files", "ok", "other users can read none")


def _list_secret_files(settings: Settings) -> list[Path]:
    options = parse_qs(urlsplit(settings.redis_url).query)
    named = [
        *(provider.key_file for provider in settings.providers),
        settings.oidc_client_secret_file,
        settings.smtp_url_file,
        *options.get("ssl_keyfile", []),
    ]
    return [*filter(Path.exists, [Path(".env")]), *(Path(name) for name in dict.fromkeys(named) if name)]


def _find_reader(path: Path) -> str:
    """Returns what other users can do with the file; '' if nothing. Raises OSError.

    A file of a read-only mount, such as a secret in a container, has no other user.
    """
    mode = path.stat().st_mode
    if os.statvfs(path).f_flag & os.ST_RDONLY or closed_folders(path.resolve().parent):
        return ""
    if mode & stat.S_IWOTH:
        return "every user of this machine can change it"
    return "every user of this machine can read it" if mode & stat.S_IROTH else ""


# -- where apps run ------------------------------------------------------------------------------------------


def _try_sandbox(settings: Settings) -> None:
    """Raises Unsafe."""
    with TemporaryDirectory(dir=_find_folder(settings)) as folder:  # which the check may fill with copies of tools
        Path(folder).chmod(0o755)  # builds run as other users
        open_sandbox(settings, APP_USERS).check(Path(folder))


async def check_sandbox(settings: Settings) -> AsyncIterator[Row]:
    if settings.trust_builds:
        yield Row("sandbox", "warn", "GATEWAY_TRUST_BUILDS: code runs without one", "use this for development only")
        return
    try:
        await asyncio.to_thread(_try_sandbox, settings)
    except Unsafe as error:
        yield Row("sandbox", "fail", error.reason, error.remedy)
    else:
        yield Row("sandbox", "ok", f"confines code, for user {os.geteuid()}")
    if await asyncio.to_thread(cgroups.find_parents):
        yield Row("control groups", "ok", "memory, processes and CPU are bounded")
    else:
        state: State = "warn" if settings.allow_private_addresses else "fail"
        action = "delegate a control group with memory, pids and cpu to the worker, or run it as root"
        yield Row("control groups", state, "this process has none", action)


async def check_caddy(settings: Settings) -> AsyncIterator[Row]:
    try:
        yield Row("caddy", "ok", caddy.find_binary())
    except NoCaddy as error:
        yield Row("caddy", "fail", "not found", str(error))
    if caddy.read_process(Path(settings.data_dir)) is not None:
        yield Row("port", "ok", f"Caddy serves the apps at {settings.apps_listen}")
        return
    host, _, port = settings.apps_listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), int(port)))
        except OSError as error:
            reason = f"{settings.apps_listen}: {error.strerror}"
            yield Row("port", "fail", reason, "stop what listens there, or change GATEWAY_APPS_LISTEN")
        else:
            yield Row("port", "ok", f"{settings.apps_listen} is free")
