"""Walks a folder that a customer's processes may change at the same time.

A folder that was found may be a link by the time it is opened, and the worker may read what the customer may not. So
each folder is opened only if it is still the one that was found, and its entries are read relative to it.
"""

import contextlib
import os
import stat
from collections.abc import Collection, Iterator
from typing import NamedTuple

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderEntry(NamedTuple):
    path: str
    folder: int  # the descriptor of the folder that contains it, until the next entry is taken
    name: str  # in that folder
    status: os.stat_result


def walk(top: str | os.PathLike[str], errors: Collection[int] = ()) -> Iterator[FolderEntry]:
    """Yields everything in the folder, at any depth that a path can have. Follows no link.

    Leaves out what cannot be read. Raises OSError if it has one of the `errors` (numbers).
    """
    pending: list[tuple[str, os.stat_result | None]] = [(os.fspath(top), None)]
    while pending:
        path, found = pending.pop()
        try:
            folder = os.open(path, FOLDER)
            try:
                if found is not None and not os.path.samestat(found, os.fstat(folder)):
                    continue
                with os.scandir(folder) as entries:
                    for each in entries:
                        with contextlib.suppress(FileNotFoundError):
                            entry = FolderEntry(
                                f"{path}/{each.name}", folder, each.name, each.stat(follow_symlinks=False)
                            )
                            if stat.S_ISDIR(entry.status.st_mode):
                                pending.append((entry.path, entry.status))
                            yield entry
            finally:
                os.close(folder)
        except OSError as error:
            if error.errno in errors:
                raise
