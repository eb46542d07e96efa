"""Follows a log of the service: prints its newest rows, and then each new row, until Ctrl-C.

It asks once per second, and recognizes the rows that it has printed by their ids. If the service is unreachable, it
tries again, a limited number of times in a row.
"""

import itertools
import json
import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import click

from capsule_gateway.cli.cells import Columns, Row, text_of
from capsule_gateway.cli.service import retry
from capsule_gateway.cli.show import Table, show_csv, wants_json, wants_table

POLL_SECONDS = 1.0
PAGE_ROWS = 100  # of a request while few rows are new
LOG_ROWS = 1_000  # the whole log

follow_option = click.option("--follow", is_flag=True, help="Print new rows until you press Ctrl-C.")

Fetch = Callable[[int], list[dict[str, Any]]]  # returns at most so many rows, newest first


def clock_of(row: Row) -> str:
    """Returns the time of day of the row, in UTC."""
    return text_of("at")(row)[11:19]


def follow_rows(
    fetch: Fetch, count: int, identity: str, columns: Columns, *, poll: float = POLL_SECONDS, **options: Any
) -> NoReturn:
    """Prints the last `count` rows and all later ones, oldest first. `options` are those of a table."""
    output = _Output(columns, **options)
    rows = retry(lambda: fetch(max(count, PAGE_ROWS)), poll)
    seen = {text_of(identity)(row) for row in rows}
    output.print_rows(rows[:count])
    while True:
        time.sleep(poll)
        rows = retry(lambda: fetch(PAGE_ROWS), poll)
        if len(rows) == PAGE_ROWS and not any(text_of(identity)(row) in seen for row in rows):
            rows = retry(lambda: fetch(LOG_ROWS), poll)
        new = [row for row in rows if text_of(identity)(row) not in seen]
        if new:
            seen = {*(text_of(identity)(row) for row in rows), *(seen if len(seen) < LOG_ROWS else ())}
            output.print_rows(new)


class _Output:
    """Prints rows that are given newest first, as the options --json and --format say: JSON has an object per line."""

    def __init__(self, columns: Columns, **options: Any) -> None:
        self._table = Table(columns, **options)
        self._fields: Collection[str] = ()  # of CSV, once its heading is printed
        self._has_headings = False

    def print_rows(self, rows: list[dict[str, Any]]) -> None:
        rows = rows[::-1]
        if wants_json():
            for row in rows:
                click.echo(json.dumps(row, ensure_ascii=False))
        elif not wants_table():
            show_csv(rows, self._fields)
            self._fields = self._fields or dict.fromkeys(itertools.chain.from_iterable(rows))
        elif self._has_headings:
            self._table.print_more(rows)
        else:
            self._table.print_rows(rows, empty_columns=True)
            self._has_headings = True
