"""Removes folders that a customer's processes have filled."""

import itertools
import os
import secrets
from contextlib import suppress
from pathlib import Path

import structlog

logger = structlog.get_logger()


def remove_folder(path: Path) -> None:
    """Removes the folder, at any depth of nesting and with any permissions. Logs a warning if something is left.

    Each inner folder is moved to the top before it is emptied. So the depth of calls, the number of open files and the
    length of paths do not grow with the depth of the tree.
    """
    try:
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _empty_folder(path.name, parent)
        os.rmdir(path.name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("folder.not_removed", folder=str(path), error=error.strerror)
    finally:
        os.close(parent)


def empty_folder(path: Path) -> None:
    """Removes everything in the folder in the same way. Raises OSError."""
    _empty_folder(str(path))


def _empty_folder(name: str, parent: int | None = None) -> None:
    top = _open_folder(name, parent)
    try:
        _empty(top)
    finally:
        os.close(top)


def _empty(top: int) -> None:
    unique = (f".{secrets.token_hex(8)}-{number}" for number in itertools.count())
    _remove_files(top)
    pending = _folder_names(top)
    while pending:
        name = pending.pop()
        with suppress(OSError):  # the caller notices if something is left
            folder = _open_folder(name, top)
            try:
                _remove_files(folder)
                for inner in _folder_names(folder):
                    with suppress(OSError):
                        pending.append(_move_up(inner, folder, next(unique), top))
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)


def _open_folder(name: str, parent: int | None) -> int:
    """Gives the folder's owner all permissions, and opens the folder. Follows no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)
        folder = os.open(name, flags, dir_fd=parent)
    if os.fstat(folder).st_mode & 0o700 != 0o700:
        os.fchmod(folder, 0o700)
    return folder


def _move_up(name: str, folder: int, unique: str, top: int) -> str:
    try:
        os.rename(name, unique, src_dir_fd=folder, dst_dir_fd=top)
    except PermissionError:  # moving a folder requires permission to write to it
        os.close(_open_folder(name, folder))
        os.rename(name, unique, src_dir_fd=folder, dst_dir_fd=top)
    return unique


def _remove_files(folder: int) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    os.unlink(entry.name, dir_fd=folder)


def _folder_names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
