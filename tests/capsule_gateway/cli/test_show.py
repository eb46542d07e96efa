"""The command line prints tables that fit the terminal, values for people, CSV, and new rows as they arrive."""

import datetime
import json
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from capsule_gateway.cli import follow
from capsule_gateway.cli.cells import format_age, format_duration, format_euro, format_size, strip_controls, text_of
from capsule_gateway.cli.service import ServiceRefusal
from capsule_gateway.cli.show import Table, as_list, show_csv
from tests.capsule_gateway.cli.conftest import Service
from tests.fakes.server import answer
from tests.support.command_line import Tool

ROWS = [
    {
        "id": f"dep_0{number:019d}",
        "app": "an-app-with-quite-a-long-name",
        "state": "failed",
        "result": "npm ended with status 1, because of https://registry.example/a-package",
        "took": "2 min 5 s",
    }
    for number in range(2)
]
COLUMNS = {name: text_of(name) for name in ROWS[0]}


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[int], list[str]]:
    """Returns a function that prints `ROWS` in a terminal of this width, and returns the lines."""

    def draw(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        Table(COLUMNS, prose="result", cut=["app"], less=["took", "result"]).print_rows(ROWS)
        return capsys.readouterr().out.splitlines()

    return draw


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140, 200])
def test_a_table_fits_and_no_id_or_address_is_broken(draw: Callable[[int], list[str]], width: int) -> None:
    lines = draw(width)
    if width >= 60:
        assert max(map(len, lines)) <= width
    for row in ROWS:
        assert sum(row["id"] in line for line in lines) == 1
    shown = "\n".join(lines)
    assert "registry" not in shown or shown.count("https://registry.example/a-package") == len(ROWS)


def test_what_gives_way_in_a_narrow_terminal(draw: Callable[[int], list[str]]) -> None:
    assert draw(200)[1].split("  ") == [*ROWS[0].values()]  # everything on one line
    assert draw(140)[2].strip() == "https://registry.example/a-package"  # the prose is folded
    assert draw(110)[0].split() == ["ID", "APP", "STATE", "RESULT", "TOOK"]
    assert "an-app-with…" in " ".join(draw(93))  # names are cut
    assert draw(90)[0].split() == ["ID", "APP", "STATE", "RESULT"]  # columns are left out
    assert draw(60)[0].split() == ["ID", "APP", "STATE"]
    assert draw(40)[:2] == [f"id      {ROWS[0]['id']}", f"app     {ROWS[0]['app']}"]  # each row is a block


def test_csv(capsys: pytest.CaptureFixture[str]) -> None:
    show_csv([{"a": "x,y", "b": None, "c": 1}, {"a": "=1+1", "c": {"d": True}, "e": "z\x1b[31m"}])
    assert capsys.readouterr().out.splitlines() == ["a,b,c,e", '"x,y",,1,', '\'=1+1,,"{""d"": true}",z[31m']
    show_csv([])
    assert capsys.readouterr().out == ""


NOW = datetime.datetime(2026, 7, 2, 12, 0, 0, tzinfo=datetime.UTC)
AGES: dict[object, str] = {
    "2026-07-02T12:00:30.000Z": "just now",  # the service's clock is ahead
    "2026-07-02T11:59:55.000Z": "just now",
    "2026-07-02T11:59:18.000Z": "42 s ago",
    "2026-07-02T11:57:00.000Z": "3 min ago",
    "2026-07-02T09:10:00.000Z": "2 h ago",
    "2026-07-01T11:00:00.000Z": "1 day ago",
    "2026-06-26T11:00:00.000Z": "6 days ago",
    "2026-06-20T12:00:00.000Z": "2026-06-20",
    "soon": "soon",
    7: "7",
}
DURATIONS = {0: "0 ms", 999: "999 ms", 1000: "1.0 s", 59_949: "59.9 s", 59_950: "1 min 0 s", 125_400: "2 min 5 s"}
SIZES = {0: "0 bytes", 1: "1 byte", 1023: "1023 bytes", 102_400: "100 KB", 100 << 20: "100 MB", 5 << 29: "2.5 GB"}
EUROS = {0: "0.00", 50_000_000: "0.05", 2_000_000_000: "2.00", 1: "0.000000001", 1_234_500_000: "1.2345"}


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (lambda then: format_age(then, NOW), AGES),
        (format_duration, DURATIONS),
        (format_size, SIZES),
        (format_euro, EUROS),
    ],
    ids=["age", "duration", "size", "euro"],
)
def test_what_people_read(form: Callable[[object], str], texts: dict[object, str]) -> None:
    assert {value: form(value) for value in texts} == texts


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert strip_controls(text).isprintable() or not {
        c for c in strip_controls(text) if ord(c) < 32 or 127 <= ord(c) < 160
    }


Page = list[dict[str, Any]] | ServiceRefusal


def rows(*numbers: int) -> list[dict[str, Any]]:
    """Returns rows, newest first."""
    newest_first = sorted(numbers, reverse=True)
    return [{"id": f"row_{number}", "at": "2026-07-02T10:00:00.000Z", "app": "notes"} for number in newest_first]


def play(*pages: Page, arguments: tuple[str, ...] = ()) -> tuple[Result, list[int]]:
    """Follows a log with these pages, and then gets Ctrl-C. Returns also the counts that were asked for."""
    left, asked = iter(pages), list[int]()

    def fetch(count: int) -> list[dict[str, Any]]:
        asked.append(count)
        page = next(left, None)
        if page is None:
            raise KeyboardInterrupt
        if isinstance(page, ServiceRefusal):
            raise page
        return page[:count]

    @click.command()
    @as_list
    def watch() -> None:
        follow.follow_rows(fetch, 2, "id", {"id": text_of("id"), "app": text_of("app")}, cut=["app"], poll=0)

    return CliRunner().invoke(watch, arguments), asked


def ids(output: str) -> Iterator[str]:
    return (line.split()[0] for line in output.splitlines() if line.startswith("row_"))


def test_each_row_is_printed_once_and_the_newest_last() -> None:
    result, _ = play(rows(1, 2, 3), rows(1, 2, 3), rows(1, 2, 3, 5), rows(2, 3, 4, 5, 6))
    assert [*ids(result.output)] == ["row_2", "row_3", "row_5", "row_4", "row_6"]
    assert result.output.count("APP") == 1


def test_more_rows_than_a_page() -> None:
    result, asked = play(rows(1), rows(*range(2, 300)), rows(*range(1, 300)))
    assert len([*ids(result.output)]) == 299
    assert asked == [100, 100, 1000, 100]


def test_a_service_that_is_away_for_a_moment() -> None:
    away = ServiceRefusal("away", temporary=True)
    result, _ = play(rows(1), away, away, rows(1, 2))
    assert [*ids(result.output)] == ["row_1", "row_2"]
    result, asked = play(rows(1), *[away] * 20)
    assert (result.exit_code, len(asked)) == (1, 17)
    result, asked = play(ServiceRefusal("no such app"))
    assert (result.exit_code, len(asked)) == (1, 1)


def test_for_programs() -> None:
    pages = ([], rows(1), rows(1, 2))
    result, _ = play(*pages, arguments=("--json",))
    assert [json.loads(line)["id"] for line in result.stdout.splitlines() if line] == ["row_1", "row_2"]
    result, _ = play(*pages, arguments=("--format", "csv"))
    assert [line for line in result.stdout.splitlines() if line] == [
        "id,at,app",
        "row_1,2026-07-02T10:00:00.000Z,notes",
        "row_2,2026-07-02T10:00:00.000Z,notes",
    ]


@pytest.mark.asyncio(loop_scope="session")
async def test_requests_and_deliveries(stubbed: Tool, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask for a page, wait, and end with Ctrl-C."""

    def press_ctrl_c(seconds: float) -> None:
        assert seconds == follow.POLL_SECONDS
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", press_ctrl_c)
    row = {"id": "id_1", "at": "2026-07-02T10:00:00.000Z", "app": "notes", "outcome": "failed"}
    service.replies = [answer(200, [row])]
    for command in ("requests --follow --app notes", "deliveries --follow"):
        run = await stubbed.run(*command.split())
        assert run.code == 130
        assert "notes" in run.out
    assert service.calls == ["GET /account/requests?app=notes&limit=100", "GET /account/deliveries?limit=100"]
