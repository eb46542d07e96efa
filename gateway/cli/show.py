"""Prints the output of the command line: tables for people, JSON for programs, single lines for everything else.

Output to a pipe has no colors and no folded lines. Ids and addresses are never folded or cut, so that they can be
copied.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

NANO_PER_EURO = 1_000_000_000
PROSE_CELLS = 24  # minimum width of a folded column, in terminal cells
GAP_CELLS = 2  # between columns

STYLES = {
    "live": "green",
    "delivered": "green",
    "operational": "green",
    "failed": "red",
    "misconfigured": "red",
    "provider-unreachable": "red",
    "dropped": "yellow",
    "canceled": "yellow",
    "quota-exhausted": "yellow",
    "building": "yellow",
    "checking": "yellow",
    "canary": "yellow",
}

Cell = str | Text
Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], Cell]]

JSON = "json"  # in the context's meta


def _note_json(context: click.Context, _: click.Parameter, given: bool) -> None:
    context.meta[JSON] = given


as_json = click.option(
    "--json", is_flag=True, expose_value=False, callback=_note_json, help="Print the service's answer as JSON."
)


def wants_json() -> bool:
    """Returns whether the running command has the option --json."""
    return bool(click.get_current_context().meta.get(JSON))


def console() -> Console:
    # With NO_COLOR, rich alone would still print bold and dim as escape sequences.
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(color_system=colors, highlight=False, markup=False, emoji=False)


def print_note(sentence: str) -> None:
    """Prints to stderr, because stdout contains only the result."""
    click.echo(sentence, err=True)


def show_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def show_table(rows: Sequence[Row], columns: Columns, *, prose: str = "", empty: str) -> None:
    """Prints the rows, without empty columns, or with --json as JSON.

    `prose` names the column that may be folded between words.
    """
    if wants_json():
        return show_json(rows)
    if not rows:
        return click.echo(empty)
    cells = {name: [_text(cell(row)) for row in rows] for name, cell in columns.items()}
    first = next(iter(columns))
    filled = {name: column for name, column in cells.items() if name == first or any(cell.plain for cell in column)}
    _print_grid([list(row) for row in zip(*filled.values(), strict=True)], list(filled), prose)


def show_fields(answer: Row, fields: Mapping[str, Callable[[Row], Cell] | Cell | None]) -> None:
    """Prints names and values in two columns, without empty values, or with --json the answer.

    A value may be a function of the answer, as for the columns of a table.
    """
    if wants_json():
        return show_json(answer)
    values = {name: value(answer) if callable(value) else value for name, value in fields.items()}
    _print_grid(
        [[Text(name, "dim"), _text(value)] for name, value in values.items() if value not in (None, "")], [], ""
    )


def show_line(answer: Any, line: str) -> None:
    """Prints the line, or with --json the answer."""
    if wants_json():
        return show_json(answer)
    click.echo(line)


def show_secret(answer: Row, name: str, note: str) -> None:
    """Prints the note, and only this field of the answer to stdout, or with --json the answer."""
    if not wants_json():
        print_note(note)
    show_line(answer, answer[name])


def _print_grid(rows: list[list[Text]], headings: list[str], prose: str) -> None:
    screen = console()
    table = Table(
        box=None, pad_edge=False, padding=(0, GAP_CELLS, 0, 0), show_header=bool(headings), header_style="dim"
    )
    needed = wanted = 0
    for index in range(len(rows[0])):
        heading = headings[index].upper() if headings else ""
        longest = max(cell_len(heading), *(cell_len(row[index].plain) for row in rows))
        least = longest
        if headings and headings[index] == prose:
            words = [word for row in rows for word in row[index].plain.split()]
            least = min(longest, max([PROSE_CELLS, *map(cell_len, words)]))
        table.add_column(heading, no_wrap=least == longest, min_width=least)
        wanted += longest + GAP_CELLS
        needed += least + GAP_CELLS
    for row in rows:
        table.add_row(*row)
    # A terminal that is too narrow wraps the lines itself, so a copy still contains whole lines.
    screen.width = max(screen.width, needed) if screen.is_terminal else wanted
    with screen.capture() as captured:
        screen.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip(), color=screen.color_system is not None)


def nested_row(row: Row, name: str) -> Row:
    """Returns the object in this field, or an empty one."""
    value = row.get(name)
    return value if isinstance(value, dict) else {}


# -- cells ---------------------------------------------------------------------------------------------------


def strip_controls(text: str) -> str:
    """Removes control characters, which could control a terminal. Newlines and tabs become spaces."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text.replace("\n", " ").replace("\t", " "))


def _text(value: Cell | None) -> Text:
    return value if isinstance(value, Text) else Text(strip_controls(value or ""))


def color_state(value: Any) -> Text:
    return Text.assemble((strip_controls(str(value or "")), STYLES.get(str(value), "")))


# The next four functions return the cell functions of a table's columns.


def text_of(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else str(row[name])


def state_of(name: str) -> Callable[[Row], Text]:
    return lambda row: color_state(row.get(name))


def age_of(name: str, missing: str = "") -> Callable[[Row], str]:
    return lambda row: missing if row.get(name) is None else format_age(row[name])


def duration_of(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else format_duration(row[name])


def format_age(iso: Any, now: datetime.datetime | None = None) -> str:
    try:
        then = datetime.datetime.fromisoformat(iso)
        seconds = int(((now or datetime.datetime.now(datetime.UTC)) - then).total_seconds())
    except (TypeError, ValueError):
        return str(iso)
    if seconds < 10:
        return "just now"
    if seconds < 60:
        return f"{seconds} s ago"
    if seconds < 3600:
        return f"{seconds // 60} min ago"
    if seconds < 86_400:
        return f"{seconds // 3600} h ago"
    if seconds < 7 * 86_400:
        days = seconds // 86_400
        return f"{days} day{'s' if days > 1 else ''} ago"
    return f"{then.astimezone():%Y-%m-%d}"


def format_duration(milliseconds: Any) -> str:
    if not isinstance(milliseconds, int | float):
        return str(milliseconds)
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    if milliseconds < 59_950:
        return f"{milliseconds / 1000:.1f} s"
    minutes, seconds = divmod(round(milliseconds / 1000), 60)
    return f"{minutes} min {seconds} s"


def format_size(count: Any) -> str:
    """Formats bytes. A KB is 1,024 bytes, as in the service's limits."""
    if not isinstance(count, int | float):
        return str(count)
    if count < 1024:
        return f"{count} byte{'' if count == 1 else 's'}"
    if count < 1_048_576:
        return f"{count / 1024:.0f} KB"
    amount, unit = (count / 2**20, "MB") if count < 2**30 else (count / 2**30, "GB")
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def format_euro(nano: Any) -> str:
    """Formats the exact amount with at least two decimals."""
    if not isinstance(nano, int):
        return str(nano)
    decimals = f"{abs(nano) % NANO_PER_EURO:09d}".rstrip("0").ljust(2, "0")
    return f"{'-' if nano < 0 else ''}{abs(nano) // NANO_PER_EURO}.{decimals}"
