"""Customers' archives: checks and packs the sources that they publish, and unpacks them for builds.

Runs in processes of its own, with Python's standard library alone: next to the gateway with little memory and time
(`sources.py`), and inside the sandbox of a build. A bug here affects one upload or one build.

The whole archive is refused if it contains absolute names, names or links that leave the folder, files written through
a link, devices, or more than the limits allow. The target of a link may contain `..` only at its start, where it goes
up from real folders. After a name, `..` would go up from the target of the link with that name. A zip is refused
besides if two programs could unpack it differently: for two entries of one name, a backslash in a name, any link.

What macOS and Windows add to folders is not unpacked. If a single folder is left at the top, its content is the source,
unless that folder is what the app serves.
"""

import contextlib
import errno
import gzip
import os
import resource
import stat
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import BinaryIO

PAGE, MANIFEST = "index.html", "capsule.toml"
ADDED_NAMES, ADDED_PREFIX = {"__MACOSX", ".DS_Store", "Thumbs.db"}, "._"  # by macOS and Windows
ENCRYPTED = 0x1 | 0x40 | 0x2000  # flags of a zip's entry: encrypted, strongly, and its header too
UTF8 = 0x800  # the flag of a name in UTF-8
CHUNK_BYTES = 1_048_576
FULL = (errno.ENOSPC, errno.EDQUOT)
NAME_CHARACTERS = 200  # of a name in a message
PART_BYTES, PATH_BYTES = 255, 4_000  # of a name between two slashes, and of a whole one: what file systems accept
# Of the processes that check and pack sources:
MEMORY_BYTES, CPU_SECONDS, NICENESS = 512 * 1_048_576, 120, 10


class Refused(Exception):
    """Account holders see the message."""


# -- tar.gz --------------------------------------------------------------------------------------------------


def unpack(archive: BinaryIO, folder: str, max_files: int, max_bytes: int, output: str = "") -> None:
    """Unpacks the tar.gz into the folder. Raises Refused, and OSError for a full disk.

    `output`: the folder of the source that is served as it is.
    """
    try:
        with gzip.open(archive) as plain:
            _extract(plain, folder, max_files, max_bytes)
            while plain.read(65_536):  # read up to the checksum at the end, which `tarfile` ignores
                pass
        _unwrap_folder(folder, output)
    except Refused:
        raise
    except Exception as error:  # of any kind, because the bytes come from a customer
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        raise Refused(f"the archive can't be unpacked: {error}") from error


def check_tar(archive: BinaryIO, max_files: int, max_bytes: int) -> None:
    """Raises Refused for a tar.gz that is outside the limits. A damaged one fails its build, whose log says so."""
    try:
        with gzip.open(archive) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
            for _ in _check_members(tar, max_files, max_bytes):
                pass
    except (Refused, MemoryError):
        raise
    except Exception:  # of any kind, because the bytes come from a customer
        return


def _extract(plain: gzip.GzipFile, folder: str, max_files: int, max_bytes: int) -> None:
    now = time.time()
    with tarfile.open(fileobj=plain, mode="r|") as tar:
        if hasattr(tarfile, "data_filter"):  # Python's own checks in addition to ours
            tar.extraction_filter = tarfile.data_filter
        for member in _check_members(tar, max_files, max_bytes):
            if _is_added(PurePosixPath(member.name)):
                continue
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.mtime = now  # the archive's time may be outside the calendar
            tar.extract(member, folder, set_attrs=not member.issym())


def _is_added(path: PurePosixPath) -> bool:
    """Returns whether the system, and not the author, made the file."""
    return any(part in ADDED_NAMES or part.startswith(ADDED_PREFIX) for part in path.parts)


def _unwrap_folder(folder: str, output: str) -> None:
    """Moves the content of the only folder at the top to the top, unless the output would no longer be there."""
    names = os.listdir(folder)
    if len(names) != 1 or not stat.S_ISDIR(os.lstat(os.path.join(folder, names[0])).st_mode):
        return
    is_source = any(os.path.lexists(os.path.join(folder, names[0], name)) for name in (MANIFEST, output))
    if output and PurePosixPath(output).parts[:1] == (names[0],) and not is_source:
        return
    # Under this name, it is in the way of no entry: the archive's own names of this kind are dropped.
    wrapper = os.path.join(folder, f"{ADDED_PREFIX}wrapper")
    os.rename(os.path.join(folder, names[0]), wrapper)
    for name in os.listdir(wrapper):
        os.rename(os.path.join(wrapper, name), os.path.join(folder, name))
    os.rmdir(wrapper)


def _check_members(tar: tarfile.TarFile, max_files: int, max_bytes: int) -> Iterator[tarfile.TarInfo]:
    """Yields each member, with a plain name. Raises Refused."""
    files, total = 0, 0
    links: set[PurePosixPath] = set()
    files_seen: set[str] = set()
    folders: set[PurePosixPath] = set()
    for member in tar:
        files, total = files + 1, total + member.size
        _check_size(files, total, max_files, max_bytes)
        path = _check_member(member, links, files_seen)
        _check_place(path, is_folder=member.isdir(), files=files_seen, folders=folders)
        member.name = str(path)
        yield member
        tar.members.clear()  # type: ignore[attr-defined]  # millions of them would take too much memory


def _check_size(files: int, total: int, max_files: int, max_bytes: int) -> None:
    if files > max_files:
        raise Refused(f"the archive has more than {max_files} files")
    if total > max_bytes:
        raise Refused(f"the archive has more than {max_bytes >> 20} MiB")


def _check_member(member: tarfile.TarInfo, links: set[PurePosixPath], files_seen: set[str]) -> PurePosixPath:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        raise Refused(f"the archive contains {_quote(member.name)}, which leaves its folder")
    if any(parent in links for parent in path.parents) or (path in links and not member.issym()):
        raise Refused(f"the archive writes {_quote(member.name)} through a link")
    if member.issym():
        if not _stays_inside(path, PurePosixPath(member.linkname)):
            raise Refused(f"the archive contains the link {_quote(member.name)}, which leaves its folder")
        links.add(path)
        files_seen.discard(str(path))  # a hard link to this link would be the same link in another folder
    elif member.islnk():
        if str(PurePosixPath(member.linkname)) not in files_seen:
            raise Refused(f"the archive contains the link {_quote(member.name)}, which points to no earlier file")
    elif member.isfile():
        files_seen.add(str(path))
    elif not member.isdir():
        raise Refused(f"the archive contains {_quote(member.name)}, which is not a file, a folder or a link")
    return path


def _check_place(path: PurePosixPath, *, is_folder: bool, files: set[str], folders: set[PurePosixPath]) -> None:
    """Raises Refused if one path is both a file and a folder, or if file systems cannot have the name."""
    _check_length(path)
    above = {path, *path.parents} if is_folder else {*path.parents}
    if (path in folders and not is_folder) or any(str(each) in files for each in above):
        raise Refused(f"the archive contains {_quote(str(path))}, but a path is both a file and a folder")
    folders |= above


def _check_length(path: PurePosixPath) -> None:
    if len(os.fsencode(path)) > PATH_BYTES or any(len(os.fsencode(part)) > PART_BYTES for part in path.parts):
        raise Refused(f"the archive contains {_quote(str(path))}, a name that is too long")


def _stays_inside(path: PurePosixPath, target: PurePosixPath) -> bool:
    ups = 0
    while ups < len(target.parts) and target.parts[ups] == "..":
        ups += 1
    return not target.is_absolute() and ".." not in target.parts[ups:] and ups < len(path.parts)


# -- zip and pages -------------------------------------------------------------------------------------------


def pack_zip(archive: BinaryIO, target: BinaryIO, max_files: int, max_bytes: int) -> None:
    """Writes the files of a zip as a tar.gz. Raises Refused."""
    try:
        with zipfile.ZipFile(archive) as found:
            entries = _check_entries(found.infolist(), max_files, max_bytes)
            with _open_tar(target) as tar:
                for path, entry in entries.items():
                    _add_entry(tar, found, path, entry)
    except Refused:
        raise
    except (Exception, MemoryError) as error:  # of any kind, because the bytes come from a customer
        raise Refused(f"the zip can't be unpacked: {error or type(error).__name__}") from error


def pack_page(page: BinaryIO, target: BinaryIO) -> None:
    """Writes a page as a tar.gz with this one file."""
    with _open_tar(target) as tar:
        tar.addfile(_describe(PAGE, os.fstat(page.fileno()).st_size), page)


def _check_entries(
    found: list[zipfile.ZipInfo], max_files: int, max_bytes: int
) -> dict[PurePosixPath, zipfile.ZipInfo]:
    """Returns the entries by their paths. Raises Refused."""
    _check_size(len(found), sum(entry.file_size for entry in found), max_files, max_bytes)
    entries: dict[PurePosixPath, zipfile.ZipInfo] = {}
    for entry in found:
        path = _check_entry(entry)
        _check_length(path)
        if path in entries:
            raise Refused(f"the zip contains {_quote(str(path))} twice")
        entries[path] = entry
    for path in entries:
        if any(parent in entries and not entries[parent].is_dir() for parent in path.parents):
            raise Refused(f"the zip contains {_quote(str(path))} below a file")
    if all(entry.is_dir() for entry in entries.values()):
        raise Refused("the zip contains no files")
    return entries


def _check_entry(entry: zipfile.ZipInfo) -> PurePosixPath:
    # `filename` ends at a NUL; `orig_filename` is the name as it is stored.
    name, kind = _read_name(entry), stat.S_IFMT(entry.external_attr >> 16)
    path = PurePosixPath(name)
    if "\\" in name:
        raise Refused(f"the zip contains {_quote(name)}, a name with a backslash; separate folders by /")
    if path.is_absolute() or ".." in path.parts or "\0" in name or not name:
        raise Refused(f"the zip contains {_quote(name)}, which leaves its folder")
    if entry.flag_bits & ENCRYPTED:
        raise Refused(f"the zip contains {_quote(name)}, which is encrypted")
    if kind == stat.S_IFLNK:
        raise Refused(
            f"the zip contains the link {_quote(name)}; replace it with its file, or pack a tar.gz, where links may be"
        )
    if kind not in (0, stat.S_IFDIR if entry.is_dir() else stat.S_IFREG):
        raise Refused(f"the zip contains {_quote(name)}, which is neither a file nor a folder")
    return path


def _read_name(entry: zipfile.ZipInfo) -> str:
    """Returns the name. Some programs, such as macOS's, write UTF-8 without saying so."""
    name = entry.orig_filename
    if not entry.flag_bits & UTF8:
        with contextlib.suppress(UnicodeError):
            return name.encode("cp437").decode()
    return name


def _add_entry(tar: tarfile.TarFile, found: zipfile.ZipFile, path: PurePosixPath, entry: zipfile.ZipInfo) -> None:
    described = _describe(str(path), entry.file_size, executable=bool(entry.external_attr >> 16 & 0o100))
    if entry.is_dir():
        described.type, described.size, described.mode = tarfile.DIRTYPE, 0, 0o755
        return tar.addfile(described)
    with found.open(entry) as content:
        tar.addfile(described, content)


def _open_tar(target: BinaryIO) -> tarfile.TarFile:
    return tarfile.open(fileobj=target, mode="w:gz", compresslevel=3, format=tarfile.PAX_FORMAT)


def _describe(name: str, size: int, *, executable: bool = False) -> tarfile.TarInfo:
    described = tarfile.TarInfo(name)
    described.size, described.mode = size, 0o755 if executable else 0o644
    return described


def _quote(name: str) -> str:
    """Quotes the name as it is, except for control characters."""
    shown = name if len(name) <= NAME_CHARACTERS else f"{name[:NAME_CHARACTERS]}…"
    return "'" + "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown) + "'"


# -- processes -----------------------------------------------------------------------------------------------


def main(command: str, *arguments: str) -> None:
    """Unpacks standard input, or packs it to standard output: `unpack`, `tar`, `zip` or `page`, and the limits.

    `unpack` may be followed by the folder that is served.
    """
    max_files, max_bytes = map(int, arguments[:2])
    if command == "unpack":  # the sandbox has limits of its own
        return unpack(sys.stdin.buffer, ".", max_files, max_bytes, *arguments[2:])
    _limit_process(max_bytes)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    match command:
        case "tar":
            check_tar(source, max_files, max_bytes)
        case "zip":
            pack_zip(source, target, max_files, max_bytes)
        case _:
            pack_page(source, target)


def end_if_full(error: OSError) -> None:
    """Ends the process with the number of the error if a disk is full, which is not the archive's fault."""
    if error.errno in FULL:
        os._exit(error.errno)  # at a normal end Python would write the rest again


def _limit_process(max_bytes: int) -> None:
    os.nice(NICENESS)
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_FSIZE, 2 * max_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
        sys.stdout.flush()
    except Refused as refused:
        sys.exit(str(refused))
    except OSError as error:
        end_if_full(error)
        raise
    except MemoryError:
        sys.exit("the archive needs too much memory")
