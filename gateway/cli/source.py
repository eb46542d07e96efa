"""Packing an app's source for `capsule deploys publish`.

What `.gitignore` and `.capsuleignore` leave out stays at home, in every folder as git reads them; a `.capsuleignore`
is read after the `.gitignore` beside it and may take back (`!dist`). Repositories, installed packages and files of
secrets never travel, whatever those files say.
"""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pathspec import GitIgnoreSpec

from gateway.cli.service import Refused

LIMIT = 104_857_600  # bytes, packed: what the service takes
NEVER = re.compile(r"\.git|node_modules|\.env(\.local|\..+\.local)?")  # Vite's names for what is not committed
IGNORE_FILES = (".gitignore", ".capsuleignore")

Rules = list[tuple[Path, GitIgnoreSpec]]  # the deepest folder last, and the last word is its


class Packed(NamedTuple):
    file: BinaryIO
    files: int
    size: int  # bytes

    def parts(self) -> Iterator[bytes]:
        self.file.seek(0)
        while part := self.file.read(65_536):
            yield part


@contextmanager
def packed(folder: Path) -> Iterator[Packed]:
    """A tar.gz in a nameless temporary file. Raises Refused, OSError."""
    folder = folder.resolve()
    with tempfile.TemporaryFile() as file:
        files = 0
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar:
            for path in _chosen(folder):
                # A second name of a file travels as a file, not as a link.
                tar.inodes.clear()  # type: ignore[attr-defined]
                tar.add(path, arcname=path.relative_to(folder).as_posix(), recursive=False, filter=_anonymous)
                files += 1
                if file.tell() > LIMIT:
                    raise _too_large()
        if not files:
            raise Refused(f"nothing to publish in {folder}: it is empty, or everything in it is ignored")
        if file.tell() > LIMIT:
            raise _too_large()
        yield Packed(file, files, file.tell())


def _too_large() -> Refused:
    return Refused(f"packed, the source is over {LIMIT // 1_048_576} MB; leave something out with a .capsuleignore")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _chosen(folder: Path) -> Iterator[Path]:
    inherited = _inherited(folder)
    if _ignored(folder, True, inherited):
        inherited = []  # the folder was named by hand: what ignores it as a whole does not count
    return _walk(folder, folder, inherited)


def _inherited(folder: Path) -> Rules:
    """Of the folders above, up to the root of the repository."""
    above: Rules = []
    for parent in (folder, *folder.parents):
        if parent != folder:
            above = _rules(parent) + above
        if (parent / ".git").exists():
            return above
    return []


def _rules(folder: Path) -> Rules:
    lines: list[str] = []
    for name in IGNORE_FILES:
        if (file := folder / name).is_file():
            lines += file.read_text(errors="replace").splitlines()
    try:
        return [(folder, GitIgnoreSpec.from_lines(lines))] if lines else []
    except ValueError as error:
        raise Refused(f"an ignore file in {folder} has a pattern that cannot be read: {error}") from None


def _ignored(path: Path, is_folder: bool, rules: Rules) -> bool:
    for base, spec in reversed(rules):
        word = spec.check_file(path.relative_to(base).as_posix() + "/" * is_folder).include
        if word is not None:
            return word
    return False


def _walk(top: Path, folder: Path, rules: Rules) -> Iterator[Path]:
    rules = rules + _rules(folder)
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=False)
        if NEVER.fullmatch(entry.name) or _ignored(path, is_folder, rules):
            continue
        if is_folder:
            yield from _walk(top, path, rules)
        elif entry.is_symlink():
            yield _inside(path, top)
        elif entry.is_file():
            yield path


def _inside(link: Path, top: Path) -> Path:
    """The service unpacks no link that leaves the source."""
    target = Path(os.readlink(link))
    if target.is_absolute() or not (link.parent / target).resolve().is_relative_to(top):
        raise Refused(f"{link} is a link out of the folder; put the file itself there, or ignore it")
    return link
