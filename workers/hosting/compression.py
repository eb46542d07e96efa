"""Compresses the text files of a release once, when it is made, so that Caddy compresses nothing at a request.

    files/app.js                      what the build made
    compressed/app.js                 the same file, with the compressed ones beside it
    compressed/app.js.gz, .zst

Caddy serves what is in `compressed` from there (`Caddyfile`). The folder is separate, because among the app's own files
Caddy would take a `data.json.gz` for a compressed `data.json`, whatever it contains.
"""

import gzip
import os
from pathlib import Path

import zstandard

from workers.hosting.content_types import TEXT_ENDINGS

FOLDER = "compressed"
SMALLEST_BYTES, LARGEST_BYTES = 1_025, 16 << 20  # of a file that is compressed; larger ones are compressed by nobody
WORTHWHILE = 0.9  # of the file's size, which the compressed one must not exceed
GZIP_LEVEL, ZSTD_LEVEL = 9, 15
ENDINGS = TEXT_ENDINGS | {".wasm"}


def compress_files(release: Path) -> None:
    """Compresses the files of a release that is served. Their names and contents are a customer's."""
    top = release / "files"
    for folder, _, names in os.walk(top):
        for name in names:
            path = Path(folder, name)
            size = path.lstat().st_size
            if path.suffix.lower() in ENDINGS and SMALLEST_BYTES <= size <= LARGEST_BYTES:
                _compress(path, release / FOLDER / path.relative_to(top))


def _compress(path: Path, copy: Path) -> None:
    content = path.read_bytes()
    encodings = {
        ".gz": gzip.compress(content, GZIP_LEVEL, mtime=0),
        ".zst": zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(content),
    }
    for ending, compressed in encodings.items():
        # A file of this name is the app's own.
        if len(compressed) <= WORTHWHILE * len(content) and not os.path.lexists(f"{path}{ending}"):
            copy.parent.mkdir(parents=True, exist_ok=True)
            Path(f"{copy}{ending}").write_bytes(compressed)
            if not copy.exists():
                os.link(path, copy)
