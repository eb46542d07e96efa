"""Fetches a build's source: the latest commit of a branch, or a stored tar.gz. Both run inside the sandbox, because
their bytes come from a customer.

git gets its own environment and configuration. It never prompts, runs no hooks, uses only the listed protocols, and
connects only to the checked addresses, for submodules too. Git LFS connects to the same port of any public address. git
reads the user name and password of a repository's address from a file of the build. They never appear in command lines,
logs or errors.
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
from gateway.deploys.records import MESSAGE_LENGTH, Origin
from gateway.deploys.states import DeployError
from gateway.outbound import addresses
from gateway.storage import check_exit_code
from workers.sandbox.folders import walk
from workers.sandbox.sandbox import ARCHIVES, MIB, Command, Sandbox, SandboxLimits

LIMITS = SandboxLimits(seconds=120, memory=1_024 * MIB, disk=1_024 * MIB, free=1_024 * MIB, processes=64)
ARCHIVE_FILES, ARCHIVE_BYTES = 50_000, 1_024 * MIB
RESOLVE_SECONDS = 10.0  # seconds
MAX_SUBMODULES, MAX_SUBMODULE_DEPTH = 50, 5
BRANCH = re.compile(r"(?!-)[^\x00-\x20\x7f~^:?*\[\\]{1,250}")
COMMIT = re.compile(r"[0-9a-f]{40,64}( |$)")  # with its subject
SSH = re.compile(r"(git\+)?ssh://|[^/@]+@[^/:@]+:(?!//)")
CREDENTIALS = re.compile(r"^([^:/?#]+:/*)?([^/?#]*)@")
GIT_VERSION = (2, 37)  # older versions ignore `http.curloptResolve`, and would bypass the check of addresses
OPTIONS = ["--depth=1", "--single-branch", "--no-tags", "--no-recurse-submodules", "--template="]

LFS_POINTER, LFS_POINTER_BYTES = b"version https://git-lfs.github.com/spec/v1\n", 1_024
NAMED_POINTERS = 10
# Without these settings, `git lfs pull` fetches the contents, and leaves the pointers.
LFS_FILTERS = [
    *("-c", "filter.lfs.clean=git-lfs clean -- %f", "-c", "filter.lfs.smudge=git-lfs smudge -- %f"),
    *("-c", "filter.lfs.process=git-lfs filter-process", "-c", "filter.lfs.required=true"),
]
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a file of a customer's

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
MISSING_BRANCH = "Remote branch .* not found"
MEANINGS = {
    MISSING_BRANCH: "the repository has no branch {branch}",
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
    or_default: bool = False,
    limits: SandboxLimits = LIMITS,
) -> Origin:
    """Clones into the build's `source` folder for an account. Returns what was cloned. Raises DeployError.

    Without a branch, it clones the default branch; with `or_default`, also if the repository lacks the branch.
    """
    await asyncio.to_thread(check_git, sandbox.environment["PATH"])
    if branch and not BRANCH.fullmatch(branch):
        raise DeployError("git does not accept this branch name")
    remote = await _check_remote(url, tenant=tenant, allow_private=allow_private)
    git = _Git(
        sandbox, uid, build, write_line, tenant=tenant, allow_private=allow_private, ca_file=ca_file, limits=limits
    )
    try:
        named = [f"--branch={branch}"] if branch else []
        cloned = await git.run(remote, "clone", *OPTIONS, *named, "--", remote.url, ".")
        if cloned.lacks_branch and or_default:
            write_line(f"There is no branch {branch}; cloning the default branch")
            cloned = await git.run(remote, "clone", *OPTIONS, "--", remote.url, ".")
            branch = ""
        if cloned.failed:
            raise DeployError(f"git clone failed: {cloned.explain(branch)}")
        head = (await git.run(remote, "log", "-1", "--format=%H %s")).last
        if not COMMIT.match(head):
            raise DeployError("the repository's default branch has no commit; push one, or name another branch")
        branch = branch or (await git.run(remote, "branch", "--show-current", write_line=lambda _: None)).last
        await git.fetch_submodules(remote)
        await git.fetch_lfs(remote)
    finally:
        git.configuration.unlink(missing_ok=True)
    commit, _, subject = head.partition(" ")
    return Origin(commit=commit, branch=branch or None, message=subject[:MESSAGE_LENGTH] or None)


class _Git:
    """git in the sandbox of a build."""

    def __init__(
        self,
        sandbox: Sandbox,
        uid: int | None,
        build: Path,
        write_line: Callable[[str], None],
        *,
        tenant: str,
        allow_private: bool,
        ca_file: str,
        limits: SandboxLimits,
    ) -> None:
        self._source, self.configuration = _make_source_folder(sandbox, uid, build), build / "gitconfig"
        self._sandbox, self._uid, self._write_line, self._limits = sandbox, uid, write_line, limits
        self._tenant, self._allow_private, self._ca_file = tenant, allow_private, ca_file
        self._submodules = 0

    async def run(
        self,
        remote: _Remote,
        *arguments: str,
        top: _Remote | None = None,
        write_line: Callable[[str], None] | None = None,
    ) -> "_GitOutput":
        """Runs a command that may reach the remote. Raises DeployError if a limit or the machine has ended it.

        `top` is the repository whose submodule the remote is.
        """
        trusted = f'[http]\n    sslCAInfo = "{self._ca_file}"\n' if self._ca_file else ""
        self.configuration.touch(mode=0o600)
        self.configuration.write_text(CONFIGURATION + (top.settings if top else "") + remote.settings + trusted)
        self._sandbox.give_to_user(self.configuration, self._uid)
        output = _GitOutput([*remote.secrets, *(top.secrets if top else [])], write_line or self._write_line)
        command = Command(
            arguments=["git", *arguments],
            folder=self._source,
            environment={
                **self._sandbox.environment,
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_GLOBAL": str(self.configuration),
                "GIT_TERMINAL_PROMPT": "0",
                "GIT_ALLOW_PROTOCOL": "https:http:file" if self._allow_private else "https",
            },
            read=[self.configuration, *remote.read, *([Path(self._ca_file)] if self._ca_file else [])],
            write=[self._source],
            connect=remote.ports,
            hosts=remote.hosts,
            limits=self._limits,
        )
        outcome = await self._sandbox.run(command, self._uid, output.add_line)
        if outcome.why:
            raise DeployError(outcome.describe("git clone", self._limits), service_fault=outcome.is_service_fault)
        output.failed = not outcome.ok
        return output

    async def fetch_submodules(
        self, top: _Remote, parent: _Remote | None = None, folder: str = ".", depth: int = 1
    ) -> None:
        """Fetches what the folder's `.gitmodules` names, and their own submodules. Raises DeployError."""
        parent = parent or top
        for name, path, url in await self._list_submodules(folder):
            shown = path if folder == "." else f"{folder}/{path}"
            self._submodules += 1
            if self._submodules > MAX_SUBMODULES or depth > MAX_SUBMODULE_DEPTH:
                raise DeployError(f"submodule {shown}: more than {MAX_SUBMODULES}, or nested too deeply")
            try:
                remote = await _check_remote(
                    _resolve_url(parent.url, url), tenant=self._tenant, allow_private=self._allow_private
                )
            except DeployError as error:
                raise DeployError(f"submodule {shown}: {error}") from None
            for arguments in (
                ["submodule", "--quiet", "init", "--", path],
                ["config", f"submodule.{name}.url", remote.url],
                ["submodule", "--quiet", "update", "--checkout", "--depth=1", "--", path],
            ):
                done = await self.run(remote, "-C", folder, *arguments, top=top)
                if done.failed:
                    raise DeployError(f"submodule {shown}: {done.explain('')}")
            self._write_line(f"Submodule {shown}")
            await self.fetch_submodules(top, remote, shown, depth + 1)

    async def fetch_lfs(self, remote: _Remote) -> None:
        """Replaces the repository's pointers by their contents, which any public host may have.

        What can't be fetched stays a pointer (`find_lfs_pointers`). Raises DeployError for more than the limits allow.
        """
        if not shutil.which("git-lfs", path=self._sandbox.environment["PATH"]):
            return
        if await asyncio.to_thread(find_lfs_pointers, self._source):
            self._write_line("Fetching files from Git LFS")
            await self.run(remote, *LFS_FILTERS, "lfs", "pull")

    async def _list_submodules(self, folder: str) -> list[tuple[str, str, str]]:
        """Returns name, path and URL of each."""
        modules = self._source / folder / ".gitmodules"
        if modules.is_symlink() or not modules.is_file():
            return []
        listing = ["config", "--file", ".gitmodules", "--get-regexp", r"^submodule\..*\.(path|url)$"]
        lines: list[str] = []
        await self.run(_Remote(""), "-C", folder, *listing, write_line=lines.append)
        found: dict[str, dict[str, str]] = {}
        for line in lines:
            if setting := re.fullmatch(r"submodule\.(.+)\.(path|url) (.+)", line):
                found.setdefault(setting[1], {})[setting[2]] = setting[3]
        return [(name, each["path"], each["url"]) for name, each in found.items() if len(each) == 2]


def _resolve_url(parent: str, url: str) -> str:
    """Returns the address of a submodule, which may be relative to its repository's."""
    if not url.startswith(("./", "../")):
        return url
    base = parent.rstrip("/")
    while url.startswith(("./", "../")):
        step, _, url = url.partition("/")
        base = base.rpartition("/")[0] if step == ".." else base
    return f"{base}/{url}"


class _GitOutput:
    """git's output, without the repository's credentials."""

    def __init__(self, secrets: list[str], write_line: Callable[[str], None]) -> None:
        self.last = self._fatal = ""
        self.failed = False
        self._secrets, self._write_line = secrets, write_line

    def add_line(self, line: str) -> None:
        for secret in self._secrets:
            line = line.replace(secret, "…")
        self.last = line
        if line.startswith("fatal: "):
            self._fatal = line.removeprefix("fatal: ")[:300]
        if not COMMIT.match(line):
            self._write_line(line)

    @property
    def lacks_branch(self) -> bool:
        return re.search(MISSING_BRANCH, self._fatal) is not None

    def explain(self, branch: str) -> str:
        meanings = (meaning for pattern, meaning in MEANINGS.items() if re.search(pattern, self._fatal))
        return next(meanings, self._fatal or "see the log").replace("{branch}", branch)


def find_lfs_pointers(source: Path) -> list[str]:
    """Returns the files whose contents are in Git LFS instead. Follows no link."""
    found = []
    for entry in walk(source):
        path = Path(entry.path).relative_to(source)
        if ".git" in path.parts or not stat.S_ISREG(entry.status.st_mode) or entry.status.st_size >= LFS_POINTER_BYTES:
            continue
        with suppress(OSError), open(os.open(entry.name, READ, dir_fd=entry.folder), "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                found.append(path.as_posix())
    return sorted(found)


def explain_lfs_pointers(files: list[str]) -> str:
    """Returns a warning that names at most ten files. Empty if there are none."""
    if not files:
        return ""
    named = ", ".join(each[:100] for each in files[:NAMED_POINTERS])
    more = f" and {len(files) - NAMED_POINTERS} more" if len(files) > NAMED_POINTERS else ""
    return f"In Git LFS, and not fetched ({len(files)}): {named}{more}. Commit these files without LFS."


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
    output: str = "",
) -> None:
    """Unpacks the archive into the build's `source` folder. Raises DeployError, and OSError for a full disk.

    `output`: the folder of the source that is served as it is; an archive may contain it alone.
    """
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
            arguments=["unpack", str(ARCHIVE_FILES), str(ARCHIVE_BYTES), output],
            folder=source,
            environment=sandbox.environment,
            write=[source],
            limits=limits,
        )
        outcome = await sandbox.run(command, uid, add_line, stdin=stdin)
    check_exit_code(outcome.code)
    if not outcome.ok:
        reason = last if last and not outcome.why else outcome.describe("unpacking the source", limits)
        raise DeployError(reason, service_fault=outcome.is_service_fault)


def read_manifest(build: Path, uid: int | None) -> bytes | None:
    """Returns the text of the source's manifest, or None if there is none. Raises ManifestError. Follows no link."""
    try:
        file = os.open(build / "source" / manifest.FILE, READ)
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
