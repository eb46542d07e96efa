"""Text files are compressed once, when their release is made, and served by a real Caddy."""

import gzip
import json
import os
import subprocess
from pathlib import Path

import zstandard

from tests.support.folders import passable_folder
from tests.support.hosted_apps import Hosting
from workers.hosting.archives import pack, prepare, unpack

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


async def test_text_is_served_as_it_was_compressed(tmp_path: Path) -> None:
    """An archive keeps the compressed files."""
    with passable_folder() as folder:
        hosting = Hosting(folder)
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
            for path, content in {
                "/deep/er/app.js": TEXT,
                "/": FILES["index.html"],
                "/UPPER.CSS": FILES["UPPER.CSS"],
            }.items():
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


async def test_files_are_compressed_below_deep_folders(deep_path: Path) -> None:
    deep = deep_path / "files" / "/".join(["d"] * 1_200)
    subprocess.run(["mkdir", "-p", deep], check=True)
    (deep / "app.js").write_text(TEXT)
    await prepare(deep_path)
    assert (deep_path / "compressed" / deep.relative_to(deep_path / "files") / "app.js.gz").is_file()
