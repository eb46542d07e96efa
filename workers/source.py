"""Where a build's source comes from: the latest commit of a branch, or a stored tar.gz. Both are taken apart inside the
sandbox, because both are a customer's bytes.

git gets an environment and a configuration of its own, asks nobody for anything, runs no hook, fetches no submodule,
speaks only the protocols named, and connects to the very addresses that were judged.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from . import egress
from .sandbox import MIB, Command, Limits, Sandbox

LIMITS = Limits(seconds=120, memory=1_024 * MIB, disk=1_024 * MIB, processes=64)
ARCHIVE_FILES, ARCHIVE_BYTES = 50_000, 1_024 * MIB
LOOK_UP = 10.0  # seconds
BRANCH = re.compile(r"(?!-)[^\x00-\x20\x7f~^:?*\[\\]{1,250}")

CONFIGURATION = """\
[core]
    hooksPath = /dev/null
[safe]
    directory = *
[http]
    followRedirects = false
    proxy =
    lowSpeedLimit = 1000
    lowSpeedTime = 30
[advice]
    detachedHead = false
"""


class Failed(Exception):
    """The deploy ends here; the message is the account holder's."""


async def clone(
    sandbox: Sandbox,
    uid: int | None,
    build: Path,
    url: str,
    branch: str,
    tell: Callable[[str], None],
    *,
    allow_private: bool,
    ca_file: str,
) -> str:
    """Into `source` in the build's folder; the commit. Raises Failed."""
    if not BRANCH.fullmatch(branch):
        raise Failed("the branch's name is not one that git takes")
    url, settings, ports, read = await _judged(url, allow_private=allow_private)
    if ca_file:
        settings += f'[http]\n    sslCAInfo = "{ca_file}"\n'
    (build / "gitconfig").write_text(CONFIGURATION + settings)
    lines: list[str] = []

    def hear(line: str) -> None:
        lines.append(line)
        tell(line)

    async def git(*arguments: str, hear: Callable[[str], None]) -> bool:
        command = Command(
            arguments=["git", *arguments],
            folder=build,
            environment={
                **sandbox.environment,
                "HOME": str(build),
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_GLOBAL": str(build / "gitconfig"),
                "GIT_TERMINAL_PROMPT": "0",
                "GIT_ASKPASS": "false",
                "GIT_ALLOW_PROTOCOL": "https:http:file" if allow_private else "https",
            },
            read=[*read, *([Path(ca_file)] if ca_file else [])],
            write=[build],
            connect=ports,
            limits=LIMITS,
        )
        ended = await sandbox.run(command, uid, hear)
        if ended.why:
            raise Failed(ended.told("git clone", LIMITS))
        return ended.ok

    options = ["--depth=1", "--single-branch", "--no-tags", "--no-recurse-submodules", "--template="]
    if not await git("clone", *options, f"--branch={branch}", "--", url, "source", hear=hear):
        fatal = [line for line in lines if line.startswith("fatal:")]
        raise Failed(f"git clone failed: {fatal[-1].removeprefix('fatal: ') if fatal else 'see the log'}")
    commit: list[str] = []
    if not await git("-C", "source", "rev-parse", "HEAD", hear=commit.append):
        raise Failed("git clone gave no commit")
    return commit[0]


async def _judged(url: str, *, allow_private: bool) -> tuple[str, str, list[int], list[Path]]:
    """The address to clone, more of git's configuration, the ports to connect to, the folders to read."""
    if allow_private and url.startswith("file:///"):
        return url, "", [], [Path(unquote(urlsplit(url).path))]
    try:
        url = egress.check_url(url, allow_private=allow_private)
        host, port = egress.host_and_port(url)
        async with asyncio.timeout(LOOK_UP):
            addresses = await egress.resolve(host, port, allow_private=allow_private)
    except egress.CallFailed as error:
        raise Failed(f"the repository's address is refused: {error}") from None
    except TimeoutError:
        raise Failed("the repository's name can't be resolved") from None
    # curl looks up nothing that stands here, so a name that changes in between (DNS rebinding) gains nothing.
    listed = ",".join(f"[{address}]" if ":" in address else address for address, _ in addresses)
    return url, f"[http]\n    curloptResolve = {host}:{port}:{listed}\n", [port], []


async def unpack(sandbox: Sandbox, uid: int | None, build: Path, archive: Path, tell: Callable[[str], None]) -> None:
    """Into `source` in the build's folder. Raises Failed."""
    source = build / "source"
    source.mkdir()
    sandbox.give(source, uid)
    lines: list[str] = []

    def hear(line: str) -> None:
        lines.append(line)
        tell(line)

    command = Command(
        unpack=(ARCHIVE_FILES, ARCHIVE_BYTES),
        folder=source,
        environment=sandbox.environment,
        write=[source],
        limits=LIMITS,
    )
    try:
        with archive.open("rb") as stdin:
            ended = await sandbox.run(command, uid, hear, stdin=stdin)
    except FileNotFoundError:
        raise Failed("the stored source has been cleaned up; publish again") from None
    if not ended.ok:
        raise Failed(lines[-1] if lines and not ended.why else ended.told("unpacking the source", LIMITS))
