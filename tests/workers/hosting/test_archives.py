"""Archives of releases, packed and unpacked by real processes, with what is made for browsers: text files, which are
compressed once, and the names of files that browsers may keep for a year.
"""

import gzip
import hashlib
import io
import itertools
import json
import os
import tarfile
from pathlib import Path

import pytest
import zstandard

from gateway.accounts.records import App
from gateway.deploys.release import ReleaseArchive
from gateway.settings import Settings
from tests.support.hosted_apps import Hosting
from workers.engine.driver import ReleaseMissing
from workers.hosting.archive_files import BadArchive
from workers.hosting.archives import pack, prepare, read_record, unpack, write_record
from workers.hosting.digests import BY_TOOL, has_digest
from workers.hosting.driver import HostDriver


@pytest.fixture
def release(tmp_path: Path) -> Path:
    release = tmp_path / "release"
    (release / "app" / "bin").mkdir(parents=True)
    (release / "app" / "bin" / "run").write_text("#!/bin/sh\n")
    (release / "app" / "bin" / "run").chmod(0o755)
    os.link(release / "app" / "bin" / "run", release / "app" / "same")
    (release / "app" / "é").symlink_to("/usr/bin/node")
    (release / "start").write_text("exec ./bin/run")
    (release / "environment").write_text("sealed")
    (release / "size").write_text("12")
    return release


async def test_a_release_is_unpacked_without_the_files_of_its_host(release: Path, tmp_path: Path) -> None:
    archive = await pack(release, tmp_path / "archive")
    (tmp_path / "out").mkdir()
    await unpack(tmp_path / "archive", archive, tmp_path / "out")
    found = sorted(os.fspath(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*"))
    assert found == ["app", "app/bin", "app/bin/run", "app/same", "app/é", "start"]
    assert os.access(tmp_path / "out" / "app" / "bin" / "run", os.X_OK)
    assert os.readlink(tmp_path / "out" / "app" / "é") == "/usr/bin/node"
    assert archive.size == (tmp_path / "archive").stat().st_size
    write_record(release, archive)
    assert read_record(release) == archive
    assert read_record(tmp_path) is None


async def test_a_damaged_archive_is_not_unpacked(release: Path, tmp_path: Path) -> None:
    archive = await pack(release, tmp_path / "archive")
    packed = (tmp_path / "archive").read_bytes()
    (tmp_path / "archive").write_bytes(packed[:-1] + bytes([packed[-1] ^ 1]))
    (tmp_path / "out").mkdir()
    with pytest.raises(BadArchive, match="damaged"):
        await unpack(tmp_path / "archive", archive, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "members",
    [
        [("../out-of-it", None, tarfile.REGTYPE)],
        [("/tmp/out-of-it", None, tarfile.REGTYPE)],
        [("link", "..", tarfile.SYMTYPE), ("link/out-of-it", None, tarfile.REGTYPE)],
        [("file", None, tarfile.REGTYPE), ("hard", "../precious", tarfile.LNKTYPE)],
        [("device", None, tarfile.FIFOTYPE)],
        [("files/leak", "/etc/passwd", tarfile.SYMTYPE)],
    ],
    ids=["dots", "absolute", "through-a-link", "hard-link", "device", "link-in-files"],
)
async def test_a_dangerous_archive_is_refused(tmp_path: Path, members: list[tuple[str, str | None, bytes]]) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, target, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target or ""
            tar.addfile(member)
    (tmp_path / "archive").write_bytes(packed.getvalue())
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").mkdir()
    right = ReleaseArchive(hashlib.sha256(packed.getvalue()).hexdigest(), len(packed.getvalue()))
    with pytest.raises(BadArchive):
        await unpack(tmp_path / "archive", right, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out", "precious"]
    assert (tmp_path / "precious").stat().st_nlink == 1


async def test_a_release_from_another_archive_is_not_placed(hosting: Hosting) -> None:
    """It is fetched again, here from a storage without it."""
    release, deploy = hosting.publish("dep_1", {"index.html": "page"}).release("dep_1"), hosting.deploy("dep_1")
    target = hosting.target(deploy, App(id="shop", name="shop", account="acc_1", createdAt=""))
    driver = HostDriver(Settings(data_dir=str(hosting.folder), apps_domain="apps.test"))
    await driver.place(target)
    write_record(release, ReleaseArchive("another", 1))
    with pytest.raises(ReleaseMissing):
        await driver.place(target)


TEXT = "".join(f"let value{number} = {number}\n" for number in range(200))
FILES: dict[str, str | bytes] = {
    "index.html": f"<script>{TEXT}</script>",
    "deep/er/app.js": TEXT,
    "small.js": "let x = 1",
    "photo.png": TEXT,
    "random.txt": os.urandom(5_000),
    "data.json": json.dumps([*range(1_000)]),
    "data.json.gz": b"the app's own",
    "UPPER.CSS": "a { color: red }\n" * 100,
}


def list_compressed(release: Path) -> list[str]:
    top = release / "compressed"
    return sorted(path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file())


async def test_text_is_served_as_it_was_compressed(hosting: Hosting, tmp_path: Path) -> None:
    """An archive keeps the compressed files."""
    release = hosting.publish("dep_1", FILES).release("dep_1")
    await prepare(release)
    packed = {"UPPER.CSS", "data.json", "deep/er/app.js", "index.html"}
    expected = {f"{name}{ending}" for name in packed for ending in ("", ".gz", ".zst")} - {"data.json.gz"}
    assert list_compressed(release) == sorted(expected)
    archive = await pack(release, tmp_path / "packed")
    (copy := tmp_path / "copy").mkdir()
    await unpack(tmp_path / "packed", archive, copy)
    assert list_compressed(copy) == sorted(expected)
    for name in ("deep/er/app.js", "data.json"):
        assert (copy / "compressed" / name).read_bytes() == (copy / "files" / name).read_bytes()
    async with hosting.served():
        for path, content in {"/deep/er/app.js": TEXT, "/": FILES["index.html"]}.items():
            for encoding, decode in {"gzip": gzip.decompress, "zstd": zstandard.decompress}.items():
                said = await hosting.ask(path, f"Accept-Encoding: {encoding}")
                assert decode(said.body).decode() == content
                assert said.headers["content-encoding"] == encoding
                assert said.headers["vary"] == "Accept-Encoding"
                assert int(said.headers["content-length"]) == len(said.body) < len(content)
            plain = await hosting.ask(path)
            assert (plain.body.decode(), "content-encoding" in plain.headers) == (content, False)
            assert plain.headers["vary"] == "Accept-Encoding"
        own = await hosting.ask("/data.json.gz", "Accept-Encoding: gzip")
        assert (own.body, "content-encoding" in own.headers) == (b"the app's own", False)
        both = await hosting.ask("/data.json", "Accept-Encoding: gzip, zstd")
        assert json.loads(zstandard.decompress(both.body)) == [*range(1_000)]
        assert (await hosting.ask("/compressed/data.json")).status == 404


IMMUTABLE = "public, max-age=31536000, immutable"
# As Vite, Vue CLI, Create React App, webpack, Astro, SvelteKit, Nuxt and Next.js write them.
DIGESTS = """
assets/index-GpEN3EET.js assets/index-B1Af3HRg.css assets/urlMatch-Cgl6axSs.js assets/index.B_TqY17P.css
js/app.5f3a9c1b.js js/chunk-vendors.0ae3f8d3.js css/app.0f8b1e2d.css static/js/main.787d8f2e.js
logo.3f2a9c1b0d4e5f6a7b8c.png static/media/logo.6ce24c58023cc2f8fd88fe9d219db6c6.svg main.0a1b2c3d4e5f6a7b.js
_astro/hoisted.D7a2kf9Q.js _app/immutable/nodes/0.B1c2D3e4.js _app/immutable/entry/start.Bq7X2z1v.js
_nuxt/entry.a1b2c3d4.css _nuxt/D7a2kf9Q.js _next/static/chunks/0a1b2c3d4e5f6789.js
_next/static/chunks/main-0a1b2c3d4e.js _next/static/css/5f3a9c1b0a1b2c3d.css
fonts/FiraSans-Regular-0fe48ade.woff2 A1B2C3D4/logo-A1B2C3D4.png
"""
# As people write them.
NAMES = """
assets/apple-touch-icon.png assets/hero-background.jpg assets/user-guide-2024.pdf assets/logo-20240608.png
assets/en-translations.json assets/site-search-index.json static/css/bootstrap-responsive.css
static/vendor.production.js assets/safari-pinned-tab.svg assets/hero-1920x1080.jpg assets/icon-64x64Icon.png
assets/app-Version2.js assets/photo-iPhone15Pro.jpg assets/logo.MyV2Logo.png build/IMG-IMG_0042b.jpg
assets/manual-Chapter10.pdf assets/a-Windows11Pro.png assets/a-face2face.jpg assets/a-decade80.jpg
assets/a-2024cafe.png assets/a-20240608a.png assets/a-20240608Draft.pdf assets/a-README2b.md
assets/a-DSC00012a.jpg assets/a-Html5Css3.png assets/a-iOS17App.png assets/a-CV2024En.pdf assets/a-12345678.js
assets/a-abcdefgh.js assets/a-ABCDEFGH.js assets/a-5f3a9c1.js assets/a-Gp-EN3EE.js assets/a-5f3a9c1b.html
assets/5f3a9c1b.HTM assets/5f3a9c1b.js assets/x86Win64.zip assets/index-GpEN3EET.js.map assets/app.js
assets/5f3a9c1b/app.js assets/index-GpEN3EET assets/a-ünïcødé12A.js
"""


@pytest.mark.parametrize("path", DIGESTS.split())
def test_a_name_that_a_tool_has_made(path: str) -> None:
    assert has_digest(path)


@pytest.mark.parametrize("path", [*NAMES.split(), f"assets/a-{'0a1b' * 11}.js", f"assets/a-{'aB1' * 4_000}.js"])
def test_a_name_that_a_person_may_have_written(path: str) -> None:
    assert not has_digest(path)


async def test_browsers_keep_what_a_tool_has_named(hosting: Hosting, tmp_path: Path) -> None:
    """Without a recognized tool, only in folders of well-known tools. Archives keep this."""
    names = [*DIGESTS.split(), "assets/app.js", "about-5f3a9c1b.html"]
    files: dict[str, str | bytes] = dict.fromkeys([*names, "404.html"], "content")
    for number, kind in enumerate(("hand", "tool")):
        deploy = hosting.deploy(f"dep_{number}", kind)
        site = hosting.build(deploy, files)
        release = site.release(deploy.id)
        if kind == "tool":
            (release / BY_TOOL).touch()
        await prepare(release)
        archive = await pack(release, tmp_path / f"{kind}.tar.gz")
        fetched = site.release(f"dep_1{number}")
        fetched.mkdir(mode=0o755)
        await unpack(tmp_path / f"{kind}.tar.gz", archive, fetched)
        site.swap(fetched.name)
        hosting.releases.serve_as(f"{kind}.apps.test", site)
    async with hosting.served():
        for name, kind in itertools.product(names, ("hand", "tool")):
            said = await hosting.ask(f"/{name}", host=f"{kind}.apps.test")
            elsewhere = name.startswith(("js/", "css/", "logo.", "main.", "fonts/", "A1B2"))
            expected = IMMUTABLE if name in DIGESTS.split() and (kind == "tool" or not elsewhere) else "no-cache"
            assert (name, kind, said.status, said.headers["cache-control"]) == (name, kind, 200, expected)
            assert ("etag" in said.headers, said.headers["x-content-type-options"]) == (True, "nosniff"), name
        for path, status in (("/about-5f3a9c1b", 200), ("/assets/gone-GpEN3EET.js", 404)):
            said = await hosting.ask(path, host="tool.apps.test")
            assert (said.status, said.headers["cache-control"]) == (status, "no-cache")
