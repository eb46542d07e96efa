"""The output of commands: bounded, without secrets, and read while it is written."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.deploys.line_times import split_stamp
from gateway.deploys.runtime_log import RuntimeLog
from workers.sandbox.output import (
    LINE_CHARACTERS,
    WAITING_BYTES,
    BuildOutput,
    LineSplitter,
    Output,
    make_concealer,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "running").mkdir()
    return tmp_path / "running" / "dep_1.output"


@contextmanager
def opened(path: Path, conceal: Callable[[str], str] = str, **limits: int) -> Iterator[Output]:
    lines = Output(path, conceal, **limits)
    try:
        yield lines
    finally:
        lines._file.close()


def texts(path: Path) -> list[str]:
    return [split_stamp(line)[1] for line in path.read_text().split("\n")[:-1]]


def sizes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.iterdir())


async def test_the_newest_mebibyte_is_kept(path: Path) -> None:
    log = RuntimeLog(str(path.parents[1]))
    with opened(path, bytes_per_second=1 << 40) as lines:
        for number in range(40_000):
            lines.write_line(f"line {number} " + "x" * 60)
            assert number % 1_000 or sizes(path) <= 1_048_576
    assert sizes(path) > 400_000
    tail = await log.tail("dep_1", 3)
    assert [line.split()[1] for line in tail] == ["39997", "39998", "39999"]
    whole = [int(line.split()[1]) for line in await log.tail("dep_1", 100_000)]
    assert whole == list(range(whole[0], 40_000)), "the former file and the current one, in order"
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


def test_output_is_cut_into_lines() -> None:
    splitter = LineSplitter()
    assert splitter.split("one\r\n\ntwo\né".encode()[:-1]) == ["one", "", "two"], "an empty line is a line"
    rest = b"\n" + b"x" * 2 * LINE_CHARACTERS + b"end\n" + b"y" * LINE_CHARACTERS + b"rest"
    longest = ["x" * LINE_CHARACTERS] * 2
    assert splitter.split("é".encode()[1:] + rest) == ["é", *longest, "end", "y" * LINE_CHARACTERS]
    assert splitter.split(b"") == ["rest"]
    assert splitter.split(b"") == []
    assert splitter.split(b"\377\n") == ["�"]


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (["10%\r20%\r100%\nnext\n"], ["100%", "next"]),
        (["10%\r", "20%\r", "100%\r", "\n"], ["100%"]),
        (["10%\r", "20%\r"], ["20%"]),
        (["one\r\ntwo\r", "\nthree\r\r\n"], ["one", "two", "three"]),
        (["x" * 3_000 + "\r", "y" * 3_000 + "\r", "z\n"], ["z"]),
    ],
)
def test_a_progress_bar_leaves_its_last_state(written: list[str], lines: list[str]) -> None:
    splitter = LineSplitter()
    found = [line for text in written for line in splitter.split(text.encode())]
    assert [*found, *splitter.split(b"")] == lines


def test_a_build_waits_for_its_worker() -> None:
    """Nothing is dropped, and little waits in memory."""
    read, write = os.pipe()
    passed = BuildOutput(write, make_concealer({"A": "a long secret"}))
    written, found = 0, b""
    while written < 100_000:
        passed.flush()
        if passed.full:
            assert len(passed._waiting) < WAITING_BYTES + 100
            found += os.read(read, 1 << 20)
            continue
        passed.write_line(f"{written} a long secret!")
        written += 1
    while found.count(b"\n") < 100_000:
        passed.flush()
        found += os.read(read, 1 << 20)
    assert found.decode().splitlines() == [f"{number} ***!" for number in range(100_000)]
    os.close(read)
    passed.write_line("nobody reads this")
    passed.flush(1)
    assert not passed.full
    os.close(write)


def test_the_number_of_concealed_secrets_is_bounded() -> None:
    """A variable with 7,200 lines counts as 500 secrets at most, because each line is searched for each."""
    conceal = make_concealer({"A": "\n".join(f"aaaa{number:04}" for number in range(7_200)), "B": "the longest of all"})
    assert conceal("the longest of all, aaaa") == "***, aaaa"
    assert conceal("aaaa0001 aaaa0498 aaaa0499 aaaa7199") == "*** *** aaaa0499 aaaa7199"


async def test_a_flood_of_output_is_dropped(path: Path) -> None:
    with opened(path) as lines:
        for _ in range(500_000):
            lines.write_line("y")
        written = path.stat().st_size
        assert written < 100_000
        lines._second = 0
        lines.write_line("afterwards")
    tail = await RuntimeLog(str(path.parents[1])).tail("dep_1", 2)
    assert "lines were dropped" in tail[0]
    assert tail[1] == "afterwards"


def test_secrets_are_concealed(path: Path) -> None:
    """A restart appends to the same file."""
    variables = {"A": "short", "B": "a long secret", "C": "a long secret, longer", "D": "line one of\nline two of"}
    for line in ("short", "x a long secret y", "a long secret, longer", "line two of it"):
        with opened(path, make_concealer(variables)) as lines:
            lines.write_line(line)
    assert texts(path) == ["short", "x *** y", "***", "*** it"]


def test_each_line_has_its_time(path: Path) -> None:
    """Whatever the line itself looks like."""
    with opened(path) as lines:
        for line in ("", "5\x1ffive", "\x1f"):
            lines.write_line(line)
    now = time.time() * 1_000
    found = [split_stamp(line) for line in path.read_text().split("\n")[:-1]]
    assert [text for _, text in found] == ["", "5\x1ffive", "\x1f"]
    assert all(at is not None and now - 10_000 < at <= now for at, _ in found)
