import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandbox import Room
from workers.builds import build
from workers.builds.build import collect_output
from workers.builds.registries import BASE_ENVIRONMENT
from workers.builds.source import DeployError
from workers.hosting import links
from workers.sandbox.sandbox import SandboxLimits

ADDRESS = "https://api.example.com/capsule/demo/ai"


@pytest.fixture
def made(room: Room) -> Path:
    """The source folder, as git or an archive leaves it."""
    source = room.build / "source"
    source.mkdir(mode=0o700)
    room.sandbox.give_to_user(source, room.uid)
    return source


async def run(room: Room, command: str, ai_url: str | None = None, **more: Any) -> None:
    more = {"limits": SandboxLimits(seconds=20), **more}
    await build.run_build_command(room.sandbox, room.uid, room.build, command, ai_url, room.lines.append, **more)


def empty(room: Room, made: Path) -> None:
    """Replaces the source folder, of which some files may be the worker's by now."""
    subprocess.run(["rm", "-rf", made], check=True)
    made.mkdir(mode=0o700)
    room.sandbox.give_to_user(made, room.uid)


def taken(room: Room, output: str = "dist", *, runs: bool = False) -> Path:
    release = room.top / "release"
    collect_output(room.build / "source", output, release, room.uid, runs=runs)
    return release / ("app" if runs else "files")


@pytest.mark.parametrize("ai_url", [None, ADDRESS])
async def test_a_build_sees_these_variables_and_no_others(room: Room, made: Path, ai_url: str | None) -> None:
    await run(room, "exec env", ai_url)
    seen = dict(line.split("=", 1) for line in room.lines[1:])
    assert seen.pop("PWD") == "/app"  # the shell sets it
    expected = {
        "PATH": room.sandbox.path,
        "LANG": "C.UTF-8",
        "HOME": "/home/app",
        "TMPDIR": "/tmp",
        "DATA_DIR": "/data",
        "CI": "true",
        **BASE_ENVIRONMENT,
        "NPM_CONFIG_CACHE": "/home/app/.cache/npm",
        "PNPM_HOME": "/home/app/.cache/pnpm",
        "YARN_CACHE_FOLDER": "/home/app/.cache/yarn",
    }
    assert seen == expected | ({"VITE_SERVICE_AI_URL": ai_url} if ai_url else {})
    assert not [value for value in seen.values() if str(room.top) in value], "no path of the host is visible"


async def test_the_mode_of_node_is_for_the_start_command(room: Room, made: Path) -> None:
    command = "echo ${NODE_ENV-unset}; NODE_ENV=test; echo $NODE_ENV $MODE"
    variables = {"NODE_ENV": "production", "MODE": "x"}
    await run(room, command, variables=variables)
    assert room.lines[1:] == ["NODE_ENV is for the start command: the build sets its own", "unset", "test x"]


async def test_files_of_a_server_beside_a_page_are_left_out(room: Room, made: Path) -> None:
    private = ["Dockerfile", "Procfile", "config.py", "contact.php", "db.sqlite3", "docker-compose.yml", "server.js"]
    public = ["app.js", "data.json", "index.html", "main.py", "notes"]
    await run(room, f"touch {' '.join([*private, *public])}; ln -s /etc/passwd wsgi.py")
    await run(room, "mkdir docs; touch docs/server.js; mkdir server.ts; touch server.ts/note")
    release = room.top / "release"
    assert collect_output(made, ".", release, room.uid, runs=False) == sorted([*private, "wsgi.py"])
    found = {path.relative_to(release).as_posix() for path in release.rglob("*") if path.is_file()}
    assert found == {f"files/{name}" for name in (*public, "docs/server.js", "server.ts/note")}


async def test_a_build_makes_a_release_or_fails(room: Room, made: Path) -> None:
    (made / "page.txt").write_text("hello")
    await run(
        room, "mkdir dist; touch $HOME/a $TMPDIR/b $DATA_DIR/c; tr a-z A-Z < page.txt > dist/index.html; echo made"
    )
    assert room.lines[1:] == ["made"]
    assert (taken(room) / "index.html").read_text() == "HELLO"
    with pytest.raises(DeployError, match=r"^the build command ended with status 3$"):
        await run(room, "exit 3")
    fill = "cd $TMPDIR; i=0; while :; do i=$((i+1)); head -c 1M /dev/zero > $i; done"
    with pytest.raises(DeployError, match=r"^the build command wrote more than 20 MiB$"):
        await run(room, fill, limits=SandboxLimits(disk=20 << 20))


# -- the output ----------------------------------------------------------------------------------------------


async def test_the_release_belongs_to_the_worker_and_has_plain_modes(room: Room, made: Path) -> None:
    await run(
        room,
        "mkdir -p dist/a dist/.git; cd dist; echo x > page; touch server.js; echo y > run; chmod 6711 run;"
        " chmod 0 page; ln page again; ln -s ../page a/up; chmod 2700 a; touch -d 2001-01-01 run",
    )
    files = taken(room)
    assert sorted(path.name for path in files.iterdir()) == ["a", "again", "page", "run", "server.js"]
    for path, mode in ((files, 0o755), (files / "a", 0o755), (files / "page", 0o644), (files / "run", 0o755)):
        status = path.stat()
        assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (mode, os.geteuid(), os.getegid())
    assert (files / "run").stat().st_mtime > 1_700_000_000


def test_an_output_that_is_missing_outside_the_source_or_behind_a_link_is_refused(room: Room, made: Path) -> None:
    (made / "page").touch()
    for output in ("dist", "dist/inner", "page"):
        with pytest.raises(DeployError, match=f"did not create the folder '{output}'"):
            taken(room, output)
    for output in ("/etc", "../other", "a/../../b", "a\0b"):
        with pytest.raises(DeployError, match="not inside the source"):
            taken(room, output)
    made.rename(other := room.top / "builds" / "other")
    made.symlink_to(other)
    with pytest.raises(DeployError, match="did not create the folder"):
        taken(room, ".")
    assert other.stat().st_mode & 0o777 == 0o700


async def test_links_are_replaced_by_their_targets(room: Room, made: Path) -> None:
    await run(
        room,
        "mkdir -p dist/v2/deep shared; echo two > dist/v2/page; echo deep > dist/v2/deep/er; echo far > shared/logo;"
        " cd dist; ln -s v2/page first; ln -s first second; ln -s v2 latest; ln -s ../shared/logo logo;"
        " ln -s ../../shared v2/assets; ln -s ../second v2/chain",
    )
    files = taken(room)
    assert [path for path in files.rglob("*") if path.is_symlink()] == []
    pages = {str(path.relative_to(files)): path.read_text().strip() for path in files.rglob("*") if path.is_file()}
    inside = {"page": "two", "deep/er": "deep", "assets/logo": "far", "chain": "two"}
    assert pages == {
        "first": "two",
        "second": "two",
        "logo": "far",
        **{f"{folder}/{name}": text for folder in ("v2", "latest") for name, text in inside.items()},
    }
    for path in files.rglob("*"):
        assert (path.stat().st_uid, path.stat().st_mode & 0o022) == (os.geteuid(), 0)


LEAVING = "which leaves the source, has no target or is part of a loop"
REFUSED = [
    *[
        (f"mkdir dist; cd dist; {script}", LEAVING)
        for script in (
            "ln -s /etc/passwd x",
            "ln -s ../../home x",
            "ln -s x x",
            "ln -s ../../../../../../../../etc/passwd x",
            "ln -s nowhere x",
            "ln -s . x",
            "ln -s /proc/self/root x",
            "mkdir a; ln -s ../../.. a/b; ln -s a/b/etc/passwd x",
        )
    ],
    ("mkdir -p dist/a dist/b; cd dist; ln -s ../b a/b; ln -s ../a b/a", "more than|part of a loop|too long"),
    ("mkdir dist; mkfifo dist/pipe", "'pipe', which is not a file"),
    (
        "mkdir dist; cd dist; n=$(printf '%0200d' 0); for i in $(seq 30); do mkdir $n; cd -P $n; done",
        "can't be read: File name too long",
    ),
    ("ln -s $HOME dist", "did not create the folder"),
    ("mkdir a; ln -s a dist", "did not create the folder"),
]


async def test_what_cannot_be_taken_is_refused(room: Room, made: Path) -> None:
    for script, reason in REFUSED:
        await run(room, script)
        with pytest.raises(DeployError, match=reason):
            taken(room)
        empty(room, made)


async def test_moving_the_output_to_the_release_leads_no_link_out_of_it(room: Room, made: Path) -> None:
    """The link's `..` ends inside the output before the move, and would lead to the root afterwards."""
    secret = room.top / "secret"
    secret.write_text("of another tenant")
    depth = "/".join(f"d{n}" for n in range(12))
    output = f"dist/{depth}"
    # In the source, the path goes through a second link. In the release, it would go up to the root of the file system.
    rest = str(secret).removeprefix("/")
    first = rest.split("/")[0]
    await run(
        room,
        f"mkdir -p {output}/{os.path.dirname(rest)}; echo mine > {output}/{rest};"
        f" ln -s {'../' * 13}{rest} {output}/leak.txt; ln -s {output}/{first} {first}",
    )
    files = taken(room, output)
    assert not (files / "leak.txt").is_symlink()
    assert (files / "leak.txt").read_text() == "mine\n"


async def test_an_app_with_a_start_command_may_contain_any_link(room: Room, made: Path) -> None:
    await run(room, "ln -s /usr/bin/python3 python; ln -s ../.. up; touch server.js")
    app = taken(room, ".", runs=True)
    assert (app / "server.js").exists()
    assert os.readlink(app / "python") == "/usr/bin/python3"
    assert app.stat().st_uid == os.geteuid()


async def test_files_that_the_build_does_not_own_are_refused(room: Room, made: Path) -> None:
    await run(room, "mkdir dist; touch dist/page")
    theirs = room.top / "theirs"
    theirs.touch(mode=0o600)
    if room.uid is None:
        room.uid = os.getuid() + 1  # as if the files belonged to another user
    else:
        os.link(theirs, made / "dist" / "theirs")
    with pytest.raises(DeployError, match="which the build does not own"):
        taken(room)
    assert theirs.stat().st_mode & 0o777 == 0o600


async def test_an_output_above_the_bounds_is_refused(room: Room, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "STATIC_FILES", 5)  # includes the folder
    monkeypatch.setattr(build, "STATIC_BYTES", 1 << 20)
    for script in ("touch 1 2 3 4 5", "truncate -s 2M sparse"):
        await run(room, f"mkdir dist; cd dist; {script}")
        with pytest.raises(DeployError, match="more than 5 files, or more than 1 MiB"):
            taken(room)
        empty(room, made)
    await run(room, "mkdir dist; cd dist; touch 1 2 3 4")
    assert len(list(taken(room).iterdir())) == 4


async def test_a_deep_git_folder_is_removed(room: Room, made: Path) -> None:
    await run(room, "mkdir -p dist/.git; touch dist/page; cd dist/.git; mkdir -p $(printf 'd/%.0s' $(seq 1200))")
    assert [path.name for path in taken(room).iterdir()] == ["page"]


async def test_a_long_chain_of_links_is_refused(room: Room, made: Path) -> None:
    await run(room, "mkdir dist; touch dist/0")
    for number in range(1, 1201):  # faster than one process per link
        link = made / "dist" / str(number)
        link.symlink_to(str(number - 1))
        if room.uid is not None:
            os.lchown(link, room.uid, room.uid)
    with pytest.raises(DeployError, match="which leaves the source"):
        taken(room)


def test_a_link_to_what_cannot_be_opened_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe, and everything on a system without openat2."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "page").touch()
    for name in ("pipe", "page"):
        (tmp_path / "link").symlink_to(name)
        assert not links.replace_link(os.fspath(tmp_path / "link"), os.fspath(tmp_path), os.geteuid())
        assert (tmp_path / "link").is_symlink()
        (tmp_path / "link").unlink()
        monkeypatch.setattr(links, "OPENAT2", 100_000)
