"""The output of a start command: bounded on disk, and read while it is written."""

from pathlib import Path

import pytest

from gateway.deploys.runtime_log import RuntimeLog
from workers.sandbox import output
from workers.sandbox.output import Output, concealer, remove_output


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "running").mkdir()
    return tmp_path / "running" / "dep_1.output"


def sizes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.iterdir())


async def test_at_most_a_mebibyte_is_kept_and_the_newest_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "BYTES_PER_SECOND", 1 << 40)
    log = RuntimeLog(str(path.parents[1]))
    with Output(path) as lines:
        for number in range(40_000):
            lines.write_line(f"line {number} " + "x" * 60)
            assert number % 1_000 or sizes(path) <= 1_048_576
    assert sizes(path) > 400_000
    tail = await log.tail("dep_1", 3)
    assert [line.split()[1] for line in tail] == ["39997", "39998", "39999"]
    whole = [int(line.split()[1]) for line in await log.tail("dep_1", 100_000)]
    assert whole == list(range(whole[0], 40_000)), "the former file and the current one, in order"
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    remove_output(path)
    assert not list(path.parent.iterdir())


async def test_a_flood_is_cut(path: Path) -> None:
    with Output(path) as lines:
        for _ in range(500_000):
            lines.write_line("y")
        written = path.stat().st_size
        assert written < 100_000
        lines._second = 0
        lines.write_line("afterwards")
    tail = await RuntimeLog(str(path.parents[1])).tail("dep_1", 2)
    assert "lines were left out" in tail[0]
    assert tail[1] == "afterwards"


def test_a_restart_goes_on_in_the_same_file(path: Path) -> None:
    for word in ("one", "two"):
        with Output(path) as lines:
            lines.write_line(word)
    assert path.read_text() == "one\ntwo\n"


def test_secrets_are_concealed(path: Path) -> None:
    variables = {"A": "short", "B": "a long secret", "C": "a long secret, longer", "D": "line one of\nline two of"}
    with Output(path, concealer(variables)) as lines:
        for line in ("short", "x a long secret y", "a long secret, longer", "line two of it"):
            lines.write_line(line)
    assert path.read_text() == "short\nx *** y\n***\n*** it\n"
