"""Packs an app's source for `capsule deploy` and `capsule deploys publish`, or reads a file that is packed already.

It omits files that `.gitignore` and `.capsuleignore` exclude, with git's rules in every folder. Each folder's
`.capsuleignore` is read after its `.gitignore`, so it can include a file again (`!dist`). Repositories, installed
packages, virtual environments, caches, files of secrets, what systems add to folders, and the data of `capsule dev` are
always omitted, whatever those files say. The dashboard has the same rules, in `ignored.js`.
"""

import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pathspec import GitIgnoreSpec

from capsule_gateway.cli.service import ServiceRefusal

SOURCE_BYTES = 104_857_600  # maximum of a packed source; the service has the same limit
# `.env`, `.envrc`, `.dev.vars` and all names derived from them: of environments, of copies, and of editors' backups.
# Examples are published, and `.env.production`, with which tools such as Vite build.
SECRETS = r"[.#~]*\.(env(?!\.production$)|dev\.vars)(?!\.(example|sample|template)$)(rc|s)?([^a-z].*)?"
CACHES = r"__pycache__|.*\.pyc|\.(pytest_|mypy_|ruff_|parcel-|eslint)?cache|\.tox|\.nox|\.turbo|\.ipynb_checkpoints"
ADDED = r"__MACOSX|\.DS_Store|Thumbs\.db|\._.*"  # by macOS and Windows
ALWAYS_IGNORED = rf"\.git|node_modules|\.?venv|\.capsule|{CACHES}|{ADDED}|{SECRETS}"
ENVIRONMENT_FILE = "pyvenv.cfg"  # at the top of each virtual environment
MAX_COUNTED = 100_000  # files that are left out
IGNORE_FILES = (".gitignore", ".capsuleignore")

Rules = list[tuple[Path, GitIgnoreSpec]]  # the deepest folder is last, and its rules take precedence


MEDIA_TYPES = {
    ".html": "text/html",
    ".htm": "text/html",
    ".zip": "application/zip",
    ".tgz": "application/gzip",
    ".gz": "application/gzip",
}


class PackedSource(NamedTuple):
    file: BinaryIO
    files: int
    omitted: int  # files that were left out, at most MAX_COUNTED
    size: int  # bytes
    media_type: str = "application/gzip"

    def read_chunks(self) -> Iterator[bytes]:
        self.file.seek(0)
        while chunk := self.file.read(65_536):
            yield chunk


@contextmanager
def open_source(path: Path) -> Iterator[PackedSource]:
    """Yields a folder as a tar.gz, or one page or archive as it is. Raises ServiceRefusal, OSError."""
    if path.is_dir():
        with pack_source(path) as packed:
            yield packed
        return
    media_type = MEDIA_TYPES.get(path.suffix.lower())
    if media_type is None:
        raise ServiceRefusal(f"{path} can't be published; name a folder, an .html page, or a .zip or .tar.gz archive")
    with path.open("rb") as file:
        size = path.stat().st_size
        if size > SOURCE_BYTES:
            raise _too_large(SOURCE_BYTES)
        yield PackedSource(file, 1, 0, size, media_type)


@contextmanager
def pack_source(
    folder: Path, *, max_bytes: int = SOURCE_BYTES, max_counted: int = MAX_COUNTED
) -> Iterator[PackedSource]:
    """Yields the folder as a tar.gz in an unnamed temporary file. Raises ServiceRefusal, OSError."""
    folder = folder.resolve()
    with tempfile.TemporaryFile() as file:
        files, selection = 0, _Selection(folder, max_counted)
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar:
            for path in selection.select():
                # Without this, tar would store a hard link's second name as a link.
                tar.inodes.clear()  # type: ignore[attr-defined]
                tar.add(path, arcname=path.relative_to(folder).as_posix(), recursive=False, filter=_drop_owner)
                files += 1
                if file.tell() > max_bytes:
                    raise _too_large(max_bytes)
        if not files:
            raise ServiceRefusal(f"nothing to publish in {folder}: it is empty, or all its files are ignored")
        if file.tell() > max_bytes:
            raise _too_large(max_bytes)
        yield PackedSource(file, files, selection.omitted, file.tell())


def _too_large(limit: int) -> ServiceRefusal:
    return ServiceRefusal(f"the packed source exceeds {limit // 1_048_576} MB; exclude files with a .capsuleignore")


def _drop_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _read_rules_above(folder: Path) -> Rules:
    """Reads the ignore files above the folder, up to the root of its repository."""
    above: Rules = []
    for parent in (folder, *folder.parents):
        if parent != folder:
            above = _read_rules(parent) + above
        if (parent / ".git").exists():
            return above
    return []


def _read_rules(folder: Path) -> Rules:
    from gateway.settings.text_files import decode_text

    lines: list[str] = []
    for name in IGNORE_FILES:
        if (file := folder / name).is_file():
            lines += decode_text(file.read_bytes()).splitlines()
    try:
        return [(folder, GitIgnoreSpec.from_lines(lines))] if lines else []
    except ValueError as error:
        raise ServiceRefusal(f"an ignore file in {folder} has an invalid pattern: {error}") from None


def _is_ignored(path: Path, is_folder: bool, rules: Rules) -> bool:
    for base, spec in reversed(rules):
        ignored = spec.check_file(path.relative_to(base).as_posix() + "/" * is_folder).include
        if ignored is not None:
            return ignored
    return False


class _Selection:
    """Selects the files of a folder to publish, and counts the others."""

    def __init__(self, top: Path, max_counted: int) -> None:
        self._top, self._max_counted, self.omitted = top, max_counted, 0

    def select(self) -> Iterator[Path]:
        rules = _read_rules_above(self._top)
        if _is_ignored(self._top, True, rules):
            rules = []  # the user named this folder, so a rule that ignores the whole folder does not apply
        return self._walk(self._top, rules)

    def _walk(self, folder: Path, rules: Rules) -> Iterator[Path]:
        rules = rules + _read_rules(folder)
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=False)
            if (
                re.fullmatch(ALWAYS_IGNORED, entry.name, re.IGNORECASE)
                or (is_folder and (path / ENVIRONMENT_FILE).exists())
                or _is_ignored(path, is_folder, rules)
            ):
                self._omit(path, is_folder)
            elif is_folder:
                yield from self._walk(path, rules)
            elif entry.is_symlink():
                _check_link(path, self._top)
                yield path
            elif entry.is_file():
                yield path

    def _omit(self, path: Path, is_folder: bool) -> None:
        counts = (len(names) for _, _, names in os.walk(path)) if is_folder else iter([1])
        while self.omitted < self._max_counted and (count := next(counts, None)) is not None:
            self.omitted = min(self.omitted + count, self._max_counted)


def _check_link(link: Path, top: Path) -> None:
    """Raises ServiceRefusal for a link that leaves the source, because the service does not unpack it."""
    target = Path(os.readlink(link))
    if target.is_absolute() or not (link.parent / target).resolve().is_relative_to(top):
        raise ServiceRefusal(
            f"{link} links to a file outside the folder; replace the link with the file, or ignore the link"
        )
