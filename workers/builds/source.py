"""Fetches a build's source: the latest commit of a branch, or a stored tar.gz. Both run inside the sandbox, because
their bytes come from a customer.

git gets its own environment and configuration. It never prompts, runs no hooks, fetches no submodules, uses only the
listed protocols, and connects only to the checked addresses. git reads the user name and password of a repository's
address from a file of the build. They never appear in command lines, logs or errors.
"""

import asyncio
import base64
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from gateway.deploys import manifest
from gateway.deploys.manifest import ManifestError
from gateway.deploys.states import DeployError
from gateway.outbound import addresses
from workers.sandbox.sandbox import ARCHIVES, MIB, Command, Sandbox, SandboxLimits

LIMITS = SandboxLimits(seconds=120, memory=1_024 * MIB, disk=1_024 * MIB, free=1_024 * MIB, processes=64)
ARCHIVE_FILES, ARCHIVE_BYTES = 50_000, 1_024 * MIB
RESOLVE_SECONDS = 10.0  # seconds
BRANCH = re.compile(r"(?!-)[^\x00-\x20\x7f~^:?*\[\\]{1,250}")
COMMIT = re.compile(r"[0-9a-f]{40,64}")
SSH = re.compile(r"(git\+)?ssh://|[^/@]+@[^/:@]+:(?!//)")
CREDENTIALS = re.compile(r"^([^:/?#]+:/*)?([^/?#]*)@")
GIT_VERSION = (2, 37)  # older versions ignore `http.curloptResolve`, and would bypass the check of addresses
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

# Patterns of git's errors, and the messages for account holders.
MEANINGS = {
    "Remote branch .* not found": "the repository has no branch {branch}",
    "could not read Username|Authentication failed": "the repository is private, or does not exist",
    "returned error: 30[1-8]": "the repository's address redirects to another one; connect that address",
}


class _Remote(msgspec.Struct, frozen=True):
    url: str  # without credentials
    settings: str = ""  # additional git configuration
    ports: list[int] = []
    hosts: list[str] = []  # its addresses, if they need not be public
    read: list[Path] = []
    secrets: list[str] = []


def check_git(path: str) -> None:
    """Raises DeployError if git is missing, or too old to use only the checked addresses."""
    git = shutil.which("git", path=path)
    output = ""
    if git is not None:
        with suppress(OSError, subprocess.TimeoutExpired):
            command = [git, "--version"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
            output = done.stdout
    found = re.match(r"git version (\d+)\.(\d+)", output)
    if found is None or tuple(map(int, found.groups())) < GIT_VERSION:
        raise DeployError(
            f"repositories can't be cloned: the worker needs git {GIT_VERSION[0]}.{GIT_VERSION[1]} or newer"
        )


def hide_credentials(url: str) -> str:
    """Removes user name and password from the address."""
    return CREDENTIALS.sub(r"\1", url)


async def clone(
    sandbox: Sandbox,
    uid: int | None,
    build: Path,
    url: str,
    branch: str,
    write_line: Callable[[str], None],
    *,
    tenant: str,
    allow_private: bool,
    ca_file: str,
    limits: SandboxLimits = LIMITS,
) -> str:
    """Clones into the build's `source` folder for an account. Returns the commit. Raises DeployError."""
    await asyncio.to_thread(check_git, sandbox.environment["PATH"])
    if not BRANCH.fullmatch(branch):
        raise DeployError("git does not accept this branch name")
    remote = await _check_remote(url, tenant=tenant, allow_private=allow_private)
    source, configuration = _make_source_folder(sandbox, uid, build), build / "gitconfig"
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
        hosts=remote.hosts,
        limits=limits,
    )
    output = _GitOutput(remote.secrets, write_line)
    try:
        configuration.touch(mode=0o600)
        trusted = f'[http]\n    sslCAInfo = "{ca_file}"\n' if ca_file else ""
        configuration.write_text(CONFIGURATION + remote.settings + trusted)
        sandbox.give_to_user(configuration, uid)
        for arguments in (["clone", *OPTIONS, f"--branch={branch}", "--", remote.url, "."], ["rev-parse", "HEAD"]):
            git = msgspec.structs.replace(command, arguments=["git", *arguments])
            outcome = await sandbox.run(git, uid, output.add_line)
            if not outcome.ok:
                raise DeployError(outcome.describe("git clone", limits) if outcome.why else output.explain(branch))
    finally:
        configuration.unlink(missing_ok=True)
    if not COMMIT.fullmatch(output.last):
        raise DeployError("git reported no commit")
    return output.last


class _GitOutput:
    """git's output, without the repository's credentials."""

    def __init__(self, secrets: list[str], write_line: Callable[[str], None]) -> None:
        self.last = self._fatal = ""
        self._secrets, self._write_line = secrets, write_line

    def add_line(self, line: str) -> None:
        for secret in self._secrets:
            line = line.replace(secret, "…")
        self.last = line
        if line.startswith("fatal: "):
            self._fatal = line.removeprefix("fatal: ")[:300]
        if not COMMIT.fullmatch(line):
            self._write_line(line)

    def explain(self, branch: str) -> str:
        meanings = (meaning for pattern, meaning in MEANINGS.items() if re.search(pattern, self._fatal))
        return f"git clone failed: {next(meanings, self._fatal or 'see the log').replace('{branch}', branch)}"


def _make_source_folder(sandbox: Sandbox, uid: int | None, build: Path) -> Path:
    source = build / "source"
    source.mkdir(mode=0o700)
    sandbox.give_to_user(source, uid)
    return source


async def _check_remote(url: str, *, tenant: str, allow_private: bool) -> _Remote:
    """Checks the repository's address, and decide how git reaches it. Raises DeployError."""
    if allow_private and url.startswith("file:///"):
        return _Remote(url, read=[Path(unquote(urlsplit(url).path))])
    if SSH.match(url):
        raise DeployError("repositories are cloned over https, not over ssh; connect the https:// address")
    found = CREDENTIALS.search(url)
    user, _, password = map(unquote, found[2].partition(":")) if found else ("", "", "")
    try:
        url = addresses.check_url(hide_credentials(url), allow_private=allow_private)
        host, port = addresses.host_and_port(url)
        async with asyncio.timeout(RESOLVE_SECONDS):
            found_addresses = await addresses.resolve(host, port, tenant=tenant, allow_private=allow_private)
    except addresses.CallFailed as error:
        raise DeployError(f"the repository's address is refused: {error}") from None
    except TimeoutError:
        raise DeployError("the repository's host name can't be resolved") from None
    settings, secrets = "", []
    if user or password:
        header = base64.b64encode(f"{user}:{password}".encode()).decode()
        origin = urlsplit(url)._replace(path="/", query="").geturl()
        settings += f'[http "{origin}"]\n    extraHeader = Authorization: Basic {header}\n'
        secrets = [header, password or user]
    if found_addresses != [(host, port)]:  # the host is a name
        # curl does not resolve names that are listed here, so git connects to the checked addresses despite rebinding.
        listed = ",".join(f"[{address}]" if ":" in address else address for address, _ in found_addresses)
        settings += f"[http]\n    curloptResolve = {host}:{port}:{listed}\n"
    hosts = [address for address, _ in found_addresses if ":" not in address] if allow_private else []
    return _Remote(url, settings, [port], hosts, secrets=secrets)


async def unpack(
    sandbox: Sandbox,
    uid: int | None,
    build: Path,
    archive: Path,
    write_line: Callable[[str], None],
    limits: SandboxLimits = LIMITS,
) -> None:
    """Unpacks the archive into the build's `source` folder. Raises DeployError."""
    last = ""

    def add_line(line: str) -> None:
        nonlocal last
        last = line
        write_line(line)

    try:
        stdin = archive.open("rb")
    except FileNotFoundError:
        raise DeployError("the stored source was removed; publish it again") from None
    with stdin:
        source = _make_source_folder(sandbox, uid, build)
        command = Command(
            program=ARCHIVES,
            arguments=["unpack", str(ARCHIVE_FILES), str(ARCHIVE_BYTES)],
            folder=source,
            environment=sandbox.environment,
            write=[source],
            limits=limits,
        )
        outcome = await sandbox.run(command, uid, add_line, stdin=stdin)
    if not outcome.ok:
        raise DeployError(last if last and not outcome.why else outcome.describe("unpacking the source", limits))


def read_manifest(build: Path, uid: int | None) -> bytes | None:
    """Returns the text of the source's manifest, or None if there is none. Raises ManifestError. Follows no link."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(build / "source" / manifest.FILE, flags)
    except FileNotFoundError:
        return None
    except OSError:  # such as a link
        raise ManifestError("must be a plain file that can be read") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != (os.geteuid() if uid is None else uid):
            raise ManifestError("must be a plain file")
        return os.read(file, manifest.MAX_BYTES + 1)
    finally:
        os.close(file)
