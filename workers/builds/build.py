"""Runs the build command and turns its output into a release that no customer process can change."""

import asyncio
import os
import stat
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath

from gateway.deploys import manifest
from gateway.deploys.recognition import SourceFolder
from gateway.deploys.states import DeployError
from gateway.deploys.unbuilt import is_private
from workers.builds.registries import PUBLIC, Registries
from workers.hosting.links import replace_link
from workers.sandbox.output import make_concealer
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import APP, DATA, HOME, MIB, TMP, Command, Sandbox, SandboxLimits
from workers.sandbox.versions import choose_versions

LIMITS = SandboxLimits(seconds=600, memory=2_048 * MIB, disk=4_096 * MIB, free=1_024 * MIB)
AUTHORITIES = "/etc/capsule/authorities.pem"
RUN = (Path(__file__).parent / "run.sh").read_text()
# Where package managers keep what they have downloaded, if they do not use `~/.cache` anyway, as pip and uv do.
DOWNLOADS = {
    "NPM_CONFIG_CACHE": f"{HOME}/.cache/npm",
    "PNPM_HOME": f"{HOME}/.cache/pnpm",
    "YARN_CACHE_FOLDER": f"{HOME}/.cache/yarn",
}
WORLD = {"home": HOME, "data": DATA, "tmp": TMP}  # of a build: its folders beside the source; none of them is kept
PORTS = [443]  # packages are downloaded over https
STATIC_FILES, STATIC_BYTES = 20_000, 512 * MIB
APP_FILES, APP_BYTES = 200_000, 2_048 * MIB


async def run_build_command(
    sandbox: Sandbox,
    uid: int | None,
    folder: Path,
    command: str,
    ai_url: str | None,
    write_line: Callable[[str], None],
    limits: SandboxLimits = LIMITS,
    variables: Mapping[str, str] = {},
    registries: Registries = PUBLIC,
) -> None:
    """Runs the command in the build's `source` folder, with the app's variables. Raises DeployError."""
    for name in WORLD:
        (folder / name).mkdir(mode=0o700, exist_ok=True)  # a cache may be there already
        sandbox.give_to_user(folder / name, uid)
    npmrc, secrets = folder / "home" / ".npmrc", {**variables, **registries.secrets}
    if registries.npmrc:
        npmrc.write_text(registries.npmrc)
        sandbox.give_to_user(npmrc, uid)
    write_line(f"$ {make_concealer(secrets)(command)}")
    authorities = await asyncio.to_thread(registries.write_authorities, folder)
    seen = {Path(authorities): AUTHORITIES} if authorities else {}
    trusted = registries.make_environment(AUTHORITIES if authorities else "")
    versions = await asyncio.to_thread(choose_versions, SourceFolder(folder / "source"), sandbox.tools)
    for line in versions.lines:
        write_line(line)
    if versions.problem:
        raise DeployError(versions.problem)
    environment = {**sandbox.prepend_path(versions.folders), "CI": "true", **DOWNLOADS, **trusted, **variables}
    environment |= {"HOME": HOME, "TMPDIR": TMP, "DATA_DIR": DATA}
    # It is for the start command. With `production`, package managers would leave out the tools that build the app.
    if environment.pop("NODE_ENV", None) is not None:
        write_line("NODE_ENV is for the start command: the build sets its own")
    if ai_url is not None:
        environment["VITE_SERVICE_AI_URL"] = ai_url
    outcome = await sandbox.run(
        Command(
            arguments=["sh", "-c", RUN, "sh", command],
            folder=Path(APP),
            places={folder / "source": APP, **{folder / name: place for name, place in WORLD.items()}, **seen},
            environment=environment,
            read=[*seen],
            write=[folder / name for name in ("source", *WORLD)],
            connect=PORTS,
            endpoints=registries.endpoints,
            limits=limits,
            secrets=secrets,
        ),
        uid,
        write_line,
    )
    if not outcome.ok:
        raise DeployError(outcome.describe("the build command", limits), service_fault=outcome.is_service_fault)


def collect_output(source: Path, output: str, release: Path, uid: int | None, *, runs: bool) -> list[str]:
    """Moves the output into the release, after all processes of the build have ended. Raises DeployError.

    Returns the names of files that visitors must not see, and which are left out of a source that is served as it is.
    """
    private: list[str] = []
    try:
        found = _find_output(source, output)
        remove_folder(found / ".git")
        if found == source and not runs:  # the files are public
            (found / manifest.FILE).unlink(missing_ok=True)
            private = sorted(path.name for path in found.iterdir() if is_private(path.name) and not path.is_dir())
            for name in private:
                (found / name).unlink()
        _take_ownership(found, source, os.geteuid() if uid is None else uid, runs=runs)
    except OSError as error:  # such as too long a path
        raise DeployError(f"the output can't be read: {error.strerror}") from None
    release.mkdir(mode=0o755)
    found.rename(release / ("app" if runs else "files"))
    return private


def _find_output(source: Path, output: str) -> Path:
    wanted = PurePosixPath(output)
    if wanted.is_absolute() or ".." in wanted.parts or "\0" in output:
        raise DeployError(f"the output folder {output!r} is not inside the source")
    path = source
    for part in ("", *wanted.parts):
        path /= part
        if path.is_symlink() or not path.is_dir():
            raise DeployError(f"the build did not create the folder {output!r}")
    return path


def _take_ownership(top: Path, source: Path, owner: int, *, runs: bool) -> None:
    """Gives the output to the worker's user and sets plain modes. Raises DeployError for files that must not be served.

    An app with a start command may contain any link, because only the app itself follows it, with its own permissions.
    In files that are served, each link is replaced by its target in the source.
    """
    max_files, max_bytes = (APP_FILES, APP_BYTES) if runs else (STATIC_FILES, STATIC_BYTES)
    files, total, pending = 0, 0, [os.fspath(top)]
    owned: set[int] = set()  # inodes of the files that already belong to the worker; a file may have several names
    while pending:
        path = pending.pop()
        status, name = os.lstat(path), os.path.relpath(path, top)
        files, total = files + 1, total + status.st_size
        if files + len(pending) > max_files or total > max_bytes:
            raise DeployError(f"the output has more than {max_files} files, or more than {max_bytes // MIB} MiB")
        if status.st_ino in owned:
            continue
        if status.st_uid != owner:
            # A hard link to a file of another user. Setting its mode would open that file to everyone.
            raise DeployError(f"the output contains {name!r}, which the build does not own")
        if stat.S_ISDIR(status.st_mode):
            _make_plain(path, 0o755)
            with os.scandir(path) as entries:
                pending += [entry.path for entry in islice(entries, max_files)]
        elif stat.S_ISREG(status.st_mode):
            _make_plain(path, 0o755 if status.st_mode & 0o100 else 0o644)
            owned.add(status.st_ino)
        elif not stat.S_ISLNK(status.st_mode):
            raise DeployError(f"the output contains {name!r}, which is not a file, a folder or a link")
        elif not runs:
            if not replace_link(path, os.fspath(source), owner):
                raise DeployError(
                    f"the output contains the link {name!r},"
                    " which leaves the source, has no target or is part of a loop"
                )
            pending.append(path)


def _make_plain(path: str, mode: int) -> None:
    os.chown(path, os.geteuid(), os.getegid())
    os.chmod(path, mode)
    os.utime(path)  # archives set the time, and web servers use it to detect changed files
