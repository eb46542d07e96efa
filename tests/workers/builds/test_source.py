import contextlib
import gzip
import http.server
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.deploys.manifest import MAX_BYTES, ManifestError
from gateway.deploys.records import Origin
from tests.support.programs import require
from tests.support.repositories import Repository
from tests.support.sandbox import Room
from workers.builds import source
from workers.builds.source import DeployError, check_git
from workers.sandbox.sandbox import MIB, SandboxLimits


@pytest.fixture
def repository(room: Room) -> Repository:
    return Repository(room.top / "repository")


async def clone(room: Room, url: str, branch: str = "main", *, allow_private: bool = True, **limits: Any) -> Origin:
    return await source.clone(
        room.sandbox,
        room.uid,
        room.build,
        url,
        branch,
        room.lines.append,
        tenant="acc",
        allow_private=allow_private,
        ca_file="",
        **limits,
    )


async def test_the_latest_commit_of_the_branch_is_cloned(room: Room, repository: Repository) -> None:
    repository.commit("index.html", "one")
    repository.git("switch", "--quiet", "--create", "feature/x#1")
    latest = repository.commit("index.html", "two")
    cloned = await clone(room, repository.url, "feature/x#1")
    assert cloned == Origin(commit=latest, branch="feature/x#1", message="index.html")
    assert (room.build / "source" / "index.html").read_text() == "two"
    assert not (room.build / "gitconfig").exists()
    assert not [line for line in room.lines if latest in line]


async def test_a_git_that_ignores_checked_addresses_is_refused(
    room: Room, repository: Repository, tmp_path: Path
) -> None:
    git = tmp_path / "git"
    path, room.sandbox.path = room.sandbox.path, str(tmp_path / "none")
    with pytest.raises(DeployError, match="needs git"):
        check_git(room.sandbox.path)
    room.sandbox.path = f"{tmp_path}{os.pathsep}{path}"
    for version in ("git version 2.36.6", "git version 1.99.0", "nonsense", ""):
        git.write_text(f'#!/bin/sh\n[ "$1" = --version ] || touch {tmp_path}/used\necho "{version}"\n')
        git.chmod(0o755)
        with pytest.raises(DeployError, match=r"the worker needs git 2\.37 or newer"):
            await clone(room, repository.url)
    assert not (tmp_path / "used").exists()


async def test_hooks_do_not_run(room: Room, repository: Repository) -> None:
    hook = repository.folder / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    repository.commit("index.html", "one")
    hook.write_text("#!/bin/sh\necho hooked; touch hooked\n")
    hook.chmod(0o755)
    await clone(room, repository.url)
    assert not (room.build / "source" / "hooked").exists()
    assert "hooked" not in room.lines


async def test_submodules_are_fetched(room: Room, repository: Repository) -> None:
    """Also one within another one, and one whose address is relative."""
    leaf, part = Repository(room.top / "leaf"), Repository(room.top / "part")
    leaf.commit("leaf.txt", "leaf")
    part.git("submodule", "--quiet", "add", "../leaf", "deep/leaf")
    part.commit("part.txt", "part")
    repository.git("submodule", "--quiet", "add", "--name", "a name.path", part.url, "its part")
    latest = repository.commit("index.html", "one")
    assert (await clone(room, repository.url)).commit == latest
    source = room.build / "source" / "its part"
    assert (source / "part.txt").read_text() == "part"
    assert (source / "deep" / "leaf" / "leaf.txt").read_text() == "leaf"
    assert [line for line in room.lines if line.startswith("Submodule")] == [
        "Submodule its part",
        "Submodule its part/deep/leaf",
    ]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("git@example.com:a/b.git", "repositories are cloned over https, not over ssh"),
        ("ext::sh -c touch% x", "address is refused"),
        ("http://no-such-host.invalid/a.git", "no-such-host.invalid"),
    ],
)
async def test_a_submodule_that_cannot_be_fetched_is_named(
    room: Room, repository: Repository, url: str, reason: str
) -> None:
    part = Repository(room.top / "part")
    part.commit("part.txt", "part")
    repository.git("submodule", "--quiet", "add", part.url, "vendor/part")
    modules = repository.folder / ".gitmodules"
    modules.write_text(modules.read_text().replace(part.url, url) + "\tupdate = !touch ran\n")
    repository.commit("index.html", "one")
    with pytest.raises(DeployError, match=rf"^submodule vendor/part: .*({reason})"):
        await clone(room, repository.url)
    assert not list(room.build.rglob("ran"))


async def test_a_submodule_at_a_private_address_is_refused(room: Room) -> None:
    strict = {"tenant": "acc", "allow_private": False, "ca_file": "", "limits": source.LIMITS}
    git = source._Git(room.sandbox, room.uid, room.build, room.lines.append, **strict)
    top = source._Remote("https://127.0.0.1/a/b.git")
    await git.run(top, "init", "--quiet")
    for url in ("https://127.0.0.1/c.git", "https://localhost/c.git", "file:///etc", "../../../x"):
        (room.build / "source" / ".gitmodules").write_text(f'[submodule "c"]\n\tpath = c\n\turl = {url}\n')
        with pytest.raises(DeployError, match=r"^submodule c: the repository's address is refused: "):
            await git.fetch_submodules(top)


def test_addresses_of_submodules() -> None:
    for url, expected in (
        ("../c.git", "https://git.example.com/a/c.git"),
        ("../../x/c", "https://git.example.com/x/c"),
        ("./c", "https://git.example.com/a/b.git/c"),
        ("https://else.example/c", "https://else.example/c"),
    ):
        assert source._resolve_url("https://git.example.com/a/b.git", url) == expected


async def test_an_invalid_branch_name_is_not_passed_to_git_and_a_missing_one_is_named(
    room: Room, repository: Repository
) -> None:
    repository.commit("index.html", "one")
    for branch in ("--upload-pack=touch x", "-b", "a b", "a\nb", "a~1", "a:b", "x" * 251, "a\\b"):
        with pytest.raises(DeployError, match="git does not accept"):
            await clone(room, repository.url, branch)
    assert room.lines == []
    for branch in ("$(touch${IFS}x)", "{branch}", "../main", "refs/heads/main", "main@{0}"):
        with pytest.raises(DeployError) as failure:
            await clone(room, repository.url, branch)
        assert str(failure.value) == f"git clone failed: the repository has no branch {branch}"
        assert not (room.build / "gitconfig").exists()
        shutil.rmtree(room.build / "source")


async def test_without_the_usual_branch_the_default_one_is_cloned(room: Room, repository: Repository) -> None:
    """The first line of the commit's message is kept."""
    with pytest.raises(DeployError, match="default branch has no commit; push one, or name another"):
        await clone(room, repository.url, "")
    repository.git("switch", "--quiet", "--create", "trunk/new")
    repository.commit("index.html", "one")
    for message, options in (("x" * 300 + "\n\nmore", {"or_default": True}), (" ", {"branch": ""})):
        shutil.rmtree(room.build / "source")
        repository.git("commit", "--amend", "--quiet", "--allow-empty-message", "--message", message)
        latest = repository.git("rev-parse", "HEAD").strip()
        cloned = await clone(room, repository.url, **options)
        assert (cloned.commit, cloned.branch) == (latest, "trunk/new")
        assert cloned.message == ("x" * 200 if message.strip() else None)
    assert "There is no branch main; cloning the default branch" in room.lines
    shutil.rmtree(room.build / "source")
    with pytest.raises(DeployError, match="the repository has no branch main"):
        await clone(room, repository.url)


async def test_files_in_lfs_are_named(room: Room, repository: Repository) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 7\n"
    for number in range(12):
        repository.commit(f"photo{number:02}.png", pointer)
    repository.commit("about.txt", f"A pointer begins so:\n{pointer}")
    (repository.folder / "link").symlink_to("photo00.png")
    repository.commit("index.html", "one")
    await clone(room, repository.url)
    found = source.find_lfs_pointers(room.build / "source")
    assert found == [f"photo{number:02}.png" for number in range(12)]
    warning = source.explain_lfs_pointers(found)
    assert warning.startswith("In Git LFS, and not fetched (12): photo00.png, ")
    assert "photo09.png and 2 more." in warning
    assert source.explain_lfs_pointers([]) == ""


@pytest.fixture
def photo(repository: Repository) -> str:
    """The content of a file in LFS, in the repository."""
    require("git-lfs")
    content = "the photo\n" * 200
    repository.commit(".gitattributes", "*.png filter=lfs -text\n")
    repository.commit_lfs("photo.png", content)
    return content


async def test_files_in_lfs_are_fetched(room: Room, repository: Repository, photo: str) -> None:
    with serving(lfs_over_http(repository)) as (port, seen):
        await clone(room, f"http://me:secret@127.0.0.1:{port}/repository/.git")
    assert set(seen) == {"Basic bWU6c2VjcmV0"}
    assert (room.build / "source" / "photo.png").read_text() == photo, room.lines
    assert source.find_lfs_pointers(room.build / "source") == []


@pytest.mark.usefixtures("photo")
async def test_a_repository_can_not_send_lfs_to_this_machine(room: Room, repository: Repository) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        repository.commit(".lfsconfig", f"[lfs]\n    url = http://127.0.0.1:{server.getsockname()[1]}/\n")
        await clone(room, repository.url)
        assert source.find_lfs_pointers(room.build / "source") == ["photo.png"]
        with pytest.raises(BlockingIOError):
            server.accept()


OTHER_ADDRESSES = [
    ("ssh://git@example.com/a.git", True, "not over ssh"),
    ("https://localhost/a.git", False, "internal use"),
    ("file:///etc", False, "https://"),
    ("ext::sh -c touch% x", True, "refused"),
    ("git://example.com/a.git", True, "https://"),
    ("--upload-pack=x", True, "https://"),
    ("https://me:hidden-one@127.0.0.1/a.git", False, "127.0.0.1 is not a public address"),
    ("https:me:hidden-one@127.0.0.1/a.git", False, "refused"),
    ("me:hidden-one@127.0.0.1/a.git", False, "refused"),
]


async def test_other_addresses_are_refused(room: Room) -> None:
    for url, allow_private, reason in OTHER_ADDRESSES:
        with pytest.raises(DeployError) as failure:
            await clone(room, url, allow_private=allow_private)
        assert reason in str(failure.value)
        assert "hidden-one" not in f"{failure.value} {source.hide_credentials(url)} {room.lines}"


async def test_a_clone_that_exceeds_a_limit_names_the_limit(room: Room, repository: Repository) -> None:
    repository.git("config", "core.compression", "0")
    repository.commit("large", os.urandom(2 * MIB).hex())
    with pytest.raises(DeployError, match=r"^git clone wrote more than 3 MiB$"):
        await clone(room, repository.url, limits=SandboxLimits(seconds=20, disk=3 * MIB))


# -- over http -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[tuple[int, list[str]]]:
    """Serves over HTTP. Yields the port, and the received `Authorization` headers."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            answer(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1], seen
        finally:
            server.shutdown()
            thread.join()


def git_over_http(folder: Path) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    """Answers with git's own CGI program."""

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.partition("?")
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
            "REQUEST_METHOD": request.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
        }
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        ended = subprocess.run(["git", "http-backend"], env=environment, input=body, capture_output=True, check=True)
        head, _, rest = ended.stdout.partition(b"\r\n\r\n")
        request.send_response(200)
        for line in head.decode().split("\r\n"):
            request.send_header(*line.split(": ", 1))
        request.end_headers()
        request.wfile.write(rest)

    return answer


def lfs_over_http(repository: Repository) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    """Answers as `git_over_http`, and for Git LFS with the contents that the repository has stored."""
    answer_git, objects = git_over_http(repository.folder.parent), repository.folder / ".git" / "lfs" / "objects"

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        folder, _, digest = request.path.partition("/info/lfs/objects/")
        if not digest:
            return answer_git(request)
        if digest == "batch":
            asked = json.loads(request.rfile.read(int(request.headers["Content-Length"])))["objects"]
            base = f"http://{request.headers['Host']}{folder}/info/lfs/objects"
            found = [{**each, "actions": {"download": {"href": f"{base}/{each['oid']}"}}} for each in asked]
            content = json.dumps({"objects": found}).encode()
        else:
            content = (objects / digest[:2] / digest[2:4] / digest).read_bytes()
        request.send_response(200)
        request.send_header("Content-Type", "application/vnd.git-lfs+json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        with contextlib.suppress(OSError):  # it has had enough
            request.wfile.write(content)

    return answer


def status(code: int, **headers: str) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()

    return answer


@pytest.mark.parametrize("host", ["127.0.0.1", "app.localhost"])
async def test_credentials_reach_the_repository_and_nothing_else(room: Room, repository: Repository, host: str) -> None:
    latest = repository.commit("index.html", "one")
    with serving(git_over_http(room.top)) as (port, seen):
        url = f"http://me:hidden%2Done@{host}:{port}/repository/.git"
        assert (await clone(room, url)).commit == latest
    assert set(seen) == {"Basic bWU6aGlkZGVuLW9uZQ=="}
    assert "hidden" not in str(room.lines)
    kept = (room.build / "source" / ".git" / "config").read_text()
    assert "hidden" not in kept
    assert "Basic" not in kept


async def test_a_full_disk_of_the_machine_is_not_the_repositorys_fault(room: Room) -> None:
    ended = threading.Event()
    with serving(lambda _: ended.wait(10)) as (port, _):
        with pytest.raises(DeployError, match="disk is almost full") as raised:
            await clone(room, f"http://127.0.0.1:{port}/a.git", limits=SandboxLimits(disk=100 * MIB, free=1 << 60))
        ended.set()
    assert raised.value.service_fault


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(302, Location="http://127.0.0.1:1/other.git"), "redirects to another one; connect that address"),
        (status(401, WWW_Authenticate='Basic realm="x"'), "the repository is private, or does not exist"),
        (status(404), "not found"),
        (status(500), "The requested URL returned error: 500"),
        (lambda request: request.wfile.write(b"fatal: nonsense\n"), "git clone failed"),
    ],
)
async def test_http_errors_are_reported(room: Room, answer: Any, reason: str) -> None:
    with serving(answer) as (port, _), pytest.raises(DeployError) as failure:
        await clone(room, f"http://me:hidden-one@127.0.0.1:{port}/a.git")
    assert reason in str(failure.value)
    assert "hidden" not in f"{failure.value} {room.lines}"


def test_only_a_plain_file_is_read_as_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    manifest, secret = tmp_path / "source" / "capsule.toml", tmp_path / "secret"
    assert source.read_manifest(tmp_path, None) is None
    manifest.write_text("x" * (2 * MAX_BYTES))
    assert source.read_manifest(tmp_path, None) == b"x" * (MAX_BYTES + 1)
    with pytest.raises(ManifestError):  # another user's
        source.read_manifest(tmp_path, os.geteuid() + 1)
    manifest.unlink()
    secret.write_text("the worker's own file")
    for command in ("ln -s ../secret", "mkfifo", "mkdir"):
        subprocess.run([*command.split(), manifest], check=True)
        with pytest.raises(ManifestError, match=r"^capsule.toml, line 1: must be a plain file"):
            source.read_manifest(tmp_path, None)
        subprocess.run(["rm", "-d", manifest], check=True)


FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def member(
    name: str, kind: bytes = FILE, link: str = "", data: bytes = b"", **more: Any
) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, len(data)
    for field, value in more.items():
        setattr(made, field, value)
    return made, data


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for made, data in members:
            tar.addfile(made, io.BytesIO(data))
    return archive.getvalue()


async def unpack(room: Room, archive: bytes, **limits: Any) -> Path:
    path = room.top / "stored.tar.gz"
    path.touch(mode=0o600)
    path.write_bytes(archive)
    await source.unpack(room.sandbox, room.uid, room.build, path, room.lines.append, **limits)
    return room.build / "source"


async def test_an_archive_comes_out_as_it_went_in(each_room: Room) -> None:
    long = "/".join(["long" * 20] * 3)
    found = await unpack(
        each_room,
        packed(
            member("./", FOLDER, mode=0o700),
            member("./a/b/page", data=b"text", mode=0o000, uid=0),
            member("run", data=b"#!/bin/sh\n", mode=0o4755),
            member("a/up", LINK, "../run"),
            member("a/down", LINK, "b/page"),
            member("nowhere", LINK, "not/there"),
            member("same", HARD, "a/b/page"),
            member(long, data=b"long"),
            member("late", data=b"", mtime=2**40),
            member("früh\n", data=b"", mtime=-1),
            member("a", FOLDER, mode=0o000),
        ),
    )
    assert (found / "a/b/page").read_text() == (found / "same").read_text() == (found / "a/down").read_text() == "text"
    assert os.readlink(found / "a/up") == "../run"
    assert os.readlink(found / "nowhere") == "not/there"
    assert (found / long).exists()
    assert (found / "früh\n").exists()
    assert oct((found / "run").stat().st_mode) == "0o100755"
    assert oct((found / "a/b/page").stat().st_mode) == "0o100644"
    assert (found / "run").stat().st_uid == (os.getuid() if each_room.uid is None else each_room.uid)


GOOD = packed(member("page", data=b"x" * 100), member("last", data=b"x"))


async def test_a_refused_and_a_damaged_archive_are_reported(room: Room) -> None:
    """tests/gateway/deploys/test_archives.py has all faults."""
    for archive, reason in (
        (packed(member("a", LINK, "../x")), r"^the archive contains the link 'a', which leaves its folder$"),
        (GOOD[:-1], "^the archive can't be unpacked"),
    ):
        with pytest.raises(DeployError, match=reason):
            await unpack(room, archive)
        (room.build / "source").rename(room.build / reason[:5])


async def test_too_many_files_and_bytes_are_refused(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "ARCHIVE_FILES", 10)
    monkeypatch.setattr(source, "ARCHIVE_BYTES", 3 * MIB)
    with pytest.raises(DeployError, match="more than 10 files"):
        await unpack(room, packed(*(member(f"{n}") for n in range(11))))
    (room.build / "source").rename(room.build / "before")
    with pytest.raises(DeployError, match="more than 3 MiB"):
        await unpack(room, packed(*(member(f"{n}", data=b"\0" * MIB) for n in range(4))))
    assert sum(path.stat().st_size for path in (room.build / "source").iterdir()) <= 3 * MIB


async def test_bombs_after_the_archive_and_in_a_header_end_at_a_limit(room: Room) -> None:
    zeros = gzip.compress(b"\0" * 10 * MIB) * 1_000
    with pytest.raises(DeployError, match="took longer than 1 seconds"):
        await unpack(room, GOOD + zeros, limits=SandboxLimits(seconds=1))
    (room.build / "source").rename(room.build / "before")
    header = member("x", data=b"", pax_headers={"comment": "x" * 80 * MIB})
    with pytest.raises(DeployError, match=r"ran out of memory; its limit is 50 MiB|can't be unpacked"):
        await unpack(room, packed(header), limits=SandboxLimits(seconds=20, memory=50 * MIB))


async def test_a_removed_source_is_reported(room: Room) -> None:
    with pytest.raises(DeployError, match="publish it again"):
        await source.unpack(room.sandbox, room.uid, room.build, room.top / "gone", room.lines.append)


async def test_a_single_folder_that_is_served_stays(room: Room) -> None:
    found = await unpack(room, packed(member("dist/a")), output="dist")
    assert [str(path.relative_to(found)) for path in sorted(found.rglob("*"))] == ["dist", "dist/a"]
