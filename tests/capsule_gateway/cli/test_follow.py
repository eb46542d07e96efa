"""Commands with --follow print new rows as they arrive, each once, in the order of time."""

import json
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from capsule_gateway.cli import follow
from capsule_gateway.cli.cells import text_of
from capsule_gateway.cli.service import ServiceRefusal
from capsule_gateway.cli.show import as_list
from tests.capsule_gateway.cli.conftest import Service
from tests.fakes.server import answer
from tests.support.command_line import Tool

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
