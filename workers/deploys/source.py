"""Where a build's source comes from: the latest commit of a branch, or a stored tar.gz. Both are taken apart inside the
sandbox, because both are a customer's bytes.

git gets an environment and a configuration of its own, asks nobody for anything, runs no hook, fetches no submodule,
speaks only the protocols named, and connects to the very addresses that were judged. A user name and password in a
repository's address are given to git in a file of the build's, and are in no command line, log or error.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from gateway.outbound import addresses
from workers.sandbox.sandbox import MIB, Command, Limits, Sandbox

LIMITS = Limits(seconds=120, memory=1_024 * MIB, disk=1_024 * MIB, processes=64)
ARCHIVE_FILES, ARCHIVE_BYTES = 50_000, 1_024 * MIB
LOOK_UP = 10.0  # seconds
BRANCH = re.compile(r"(?!-)[^\x00-\x20\x7f~^:?*\[\\]{1,250}")
COMMIT = re.compile(r"[0-9a-f]{40,64}")
SSH = re.compile(r"(git\+)?ssh://|[^/@]+@[^/:@]+:(?!//)")
CREDENTIALS = re.compile(r"^([^:/?#]+:/*)?([^/?#]*)@")
OPTIONS = ["--depth=1", "--single-branch", "--no-tags", "--no-recurse-submodules", "--template="]

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

# What git says, and what it means to the account holder.
MEANINGS = {
    "Remote branch .* not found": "the repository has no branch {branch}",
    "could not read Username|Authentication failed": "the repository is private, or not there",
    "returned error: 30[1-8]": "the repository's address leads to another one; connect that one",
}


class Failed(Exception):
    """The deploy ends here; the message is the account holder's."""


class _Remote(msgspec.Struct, frozen=True):
    url: str  # without credentials
    settings: str = ""  # more of git's configuration
    ports: list[int] = []
    read: list[Path] = []
    secrets: list[str] = []


def shown(url: str) -> str:
    """A repository's address without the user name and password."""
    return CREDENTIALS.sub(r"\1", url)


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
    limits: Limits = LIMITS,
) -> str:
    """Into `source` in the build's folder; the commit. Raises Failed."""
    if not BRANCH.fullmatch(branch):
        raise Failed("the branch's name is not one that git takes")
    remote = await _judged(url, allow_private=allow_private)
    source, configuration = _source(sandbox, uid, build), build / "gitconfig"
    command = Command(
        folder=source,
        environment={
            **sandbox.environment,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": str(configuration),
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ALLOW_PROTOCOL": "https:http:file" if allow_private else "https",
        },
        read=[configuration, *remote.read, *([Path(ca_file)] if ca_file else [])],
        write=[source],
        connect=remote.ports,
        limits=limits,
    )
    said = _Said(remote.secrets, tell)
    try:
        configuration.touch(mode=0o600)
        trusted = f'[http]\n    sslCAInfo = "{ca_file}"\n' if ca_file else ""
        configuration.write_text(CONFIGURATION + remote.settings + trusted)
        sandbox.give(configuration, uid)
        for arguments in (["clone", *OPTIONS, f"--branch={branch}", "--", remote.url, "."], ["rev-parse", "HEAD"]):
            told = msgspec.structs.replace(command, arguments=["git", *arguments])
            ended = await sandbox.run(told, uid, said.hear)
            if not ended.ok:
                raise Failed(ended.told("git clone", limits) if ended.why else said.reason(branch))
    finally:
        configuration.unlink(missing_ok=True)
    if not COMMIT.fullmatch(said.last):
        raise Failed("git clone gave no commit")
    return said.last


class _Said:
    """What git said, with nothing secret in it."""

    def __init__(self, secrets: list[str], tell: Callable[[str], None]) -> None:
        self.last = self._fatal = ""
        self._secrets, self._tell = secrets, tell

    def hear(self, line: str) -> None:
        for secret in self._secrets:
            line = line.replace(secret, "…")
        self.last = line
        if line.startswith("fatal: "):
            self._fatal = line.removeprefix("fatal: ")[:300]
        if not COMMIT.fullmatch(line):
            self._tell(line)

    def reason(self, branch: str) -> str:
        meant = (meaning for pattern, meaning in MEANINGS.items() if re.search(pattern, self._fatal))
        return f"git clone failed: {next(meant, self._fatal or 'see the log').replace('{branch}', branch)}"


def _source(sandbox: Sandbox, uid: int | None, build: Path) -> Path:
    source = build / "source"
    source.mkdir(mode=0o700)
    sandbox.give(source, uid)
    return source


async def _judged(url: str, *, allow_private: bool) -> _Remote:
    """What may be cloned, and how it is reached. Raises Failed."""
    if allow_private and url.startswith("file:///"):
        return _Remote(url, read=[Path(unquote(urlsplit(url).path))])
    if SSH.match(url):
        raise Failed("repositories are cloned over https, not over ssh; connect its https:// address")
    found = CREDENTIALS.search(url)
    user, _, password = map(unquote, found[2].partition(":")) if found else ("", "", "")
    try:
        url = addresses.check_url(shown(url), allow_private=allow_private)
        host, port = addresses.host_and_port(url)
        async with asyncio.timeout(LOOK_UP):
            found_addresses = await addresses.resolve(host, port, allow_private=allow_private)
    except addresses.CallFailed as error:
        raise Failed(f"the repository's address is refused: {error}") from None
    except TimeoutError:
        raise Failed("the repository's name can't be resolved") from None
    settings, secrets = "", []
    if user or password:
        header = base64.b64encode(f"{user}:{password}".encode()).decode()
        origin = urlsplit(url)._replace(path="/", query="").geturl()
        settings += f'[http "{origin}"]\n    extraHeader = Authorization: Basic {header}\n'
        secrets = [header, password or user]
    if not _is_address(host):
        # curl looks up nothing that stands here, so a name that changes in between (DNS rebinding) gains nothing.
        listed = ",".join(f"[{address}]" if ":" in address else address for address, _ in found_addresses)
        settings += f"[http]\n    curloptResolve = {host}:{port}:{listed}\n"
    return _Remote(url, settings, [port], secrets=secrets)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def unpack(
    sandbox: Sandbox,
    uid: int | None,
    build: Path,
    archive: Path,
    tell: Callable[[str], None],
    limits: Limits = LIMITS,
) -> None:
    """Into `source` in the build's folder. Raises Failed."""
    last = ""

    def hear(line: str) -> None:
        nonlocal last
        last = line
        tell(line)

    try:
        stdin = archive.open("rb")
    except FileNotFoundError:
        raise Failed("the stored source has been cleaned up; publish again") from None
    with stdin:
        source = _source(sandbox, uid, build)
        command = Command(
            unpack=(ARCHIVE_FILES, ARCHIVE_BYTES),
            folder=source,
            environment=sandbox.environment,
            write=[source],
            limits=limits,
        )
        ended = await sandbox.run(command, uid, hear, stdin=stdin)
    if not ended.ok:
        raise Failed(last if last and not ended.why else ended.told("unpacking the source", limits))
