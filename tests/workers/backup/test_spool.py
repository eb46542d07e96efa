"""The files that are on the way: how many and how large together, and what stays of them."""

import asyncio
import errno
from pathlib import Path

import pytest

from workers.backup.spool import PARALLEL, SPOOL_BYTES, Spool, SpoolFailed, open_spool


async def follow(spool: Spool, sizes: list[int]) -> list[list[int]]:
    """Returns the sizes of the files that were there together, after each of them began."""
    present, found = list[int](), list[list[int]]()

    async def use(size: int) -> None:
        async with spool.file(size) as path:
            path.touch()
            present.append(size)
            found.append(sorted(present))
            await asyncio.sleep(0)
            present.remove(size)

    async with asyncio.TaskGroup() as group:
        for size in sizes:
            group.create_task(use(size))
    return found


async def test_the_space_is_bounded(tmp_path: Path) -> None:
    third, larger = SPOOL_BYTES // 3, SPOOL_BYTES + 1
    with open_spool(tmp_path) as spool:
        many = await follow(spool, [1] * 50)
        large = await follow(spool, [third] * 10 + [larger] + [third] * 10 + [larger, 1])
    assert (len(many), max(map(len, many))) == (50, PARALLEL)
    assert (len(large), max(map(len, large))) == (23, 3)
    assert all(sum(sizes) <= SPOOL_BYTES or sizes == [larger] for sizes in large)
    assert not [*tmp_path.iterdir()]


async def fail(spool: Spool) -> None:
    async with spool.file(SPOOL_BYTES) as path:
        path.write_bytes(b"part of it")
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_copy_that_fails_leaves_its_room(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        for _ in range(2 * PARALLEL):
            with pytest.raises(SpoolFailed, match=r"^/.*: No space left on device; make room there, "):
                await fail(spool)
        assert [path.name for path in tmp_path.glob("spool-*/*")] == ["lock"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpoolFailed, match=r"Not a directory|File exists"), open_spool(tmp_path / "file"):
        pass
