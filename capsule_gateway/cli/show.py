"""Prints the output of the command line: tables for people, JSON and CSV for programs, single lines for the rest.

Output to a pipe has no colors and no folded lines. In a terminal, a table fits its width: headings and texts are
folded, names are cut, columns are left out, and if that is not enough, each row becomes a block of lines. Ids and
addresses are never folded or cut, so that they can be copied.

rich takes longer to import than most commands take to run, so only tables and colors import it.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from capsule_gateway.cli.arguments import RenamedOption
from capsule_gateway.cli.cells import Cell, Columns, Row, strip_controls, text_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from gateway.settings.parsing import Doubt

PROSE_CELLS = 24  # minimum width of a folded column, in terminal cells
NAME_CELLS = 12  # minimum width of a column whose values may be cut
GAP_CELLS = 2  # between columns

FORMAT = "format"  # in the context's meta


def _note_format(context: click.Context, _: click.Parameter, name: str | None) -> None:
    if name and context.meta.setdefault(FORMAT, name) != name:
        raise click.UsageError("give either --json or --format", context)


as_json = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=lambda context, option, given: _note_format(context, option, "json" if given else None),
    help="Print the service's answer as JSON.",
)
_format_option = click.option(
    "--format",
    cls=RenamedOption,
    formerly=["--output", "-o"],
    type=click.Choice(["table", "json", "csv"]),
    expose_value=False,
    callback=_note_format,
    help="Print a table (the default), or the fields of the service's answer as JSON or CSV.",
)


def as_list(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options --json and --format to a command that lists rows."""
    return as_json(_format_option(command))


def _output_format() -> str:
    return str(click.get_current_context().meta.get(FORMAT, "table"))


def wants_json() -> bool:
    """Returns whether the running command prints JSON."""
    return _output_format() == "json"


def wants_table() -> bool:
    """Returns whether the running command prints for people."""
    return _output_format() == "table"


def console() -> Console:
    from rich.console import Console

    # With NO_COLOR, rich alone would still print bold and dim as escape sequences.
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(color_system=colors, highlight=False, markup=False, emoji=False)


def print_note(sentence: str) -> None:
    """Prints to stderr, because stdout contains only the result."""
    click.echo(sentence, err=True)


def print_doubts(doubts: Iterable[Doubt]) -> None:
    for doubt in doubts:
        print_note(f"capsule: {doubt.fault}; {doubt.action}")


def show_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def show_csv(rows: Sequence[Row], fields: Collection[str] = ()) -> None:
    """Prints the fields of the rows, without a heading if `fields` are given. A nested value is JSON.

    A spreadsheet would run a text that begins like a formula, so such a text gets an apostrophe.
    """
    names = fields or dict.fromkeys(itertools.chain.from_iterable(rows))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if names and not fields:
        writer.writerow(names)
    writer.writerows([_format_value(row.get(name)) for name in names] for row in rows)
    sys.stdout.flush()


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        text = strip_controls(value)
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def show_table(
    rows: Sequence[Row],
    columns: Columns,
    *,
    prose: str = "",
    cut: Collection[str] = (),
    less: Collection[str] = (),
    empty: str,
) -> None:
    """Prints the rows, without empty columns, or as the options --json and --format say.

    In a narrow terminal, the column `prose` is folded between words, values of the columns `cut` are cut, and the
    columns `less` are left out, beginning with the first.
    """
    if wants_json():
        return show_json(rows)
    if not wants_table():
        return show_csv(rows)
    if not rows:
        return click.echo(empty)
    Table(columns, prose=prose, cut=cut, less=less).print_rows(rows)


def print_next_page(rows: Sequence[Row], limit: int, cursor: str) -> None:
    """Prints the command that lists the rows after a full page, with the filters of the running command.

    `cursor` is the field that it continues from.
    """
    if len(rows) < limit or not wants_table():
        return
    context, given = click.get_current_context(), dict[str, str]()
    for option in context.command.params:
        if context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE and option.expose_value:
            given[option.opts[0]] = str(context.params[option.name or ""])
    given["--before"] = text_of(cursor)(rows[-1])
    command = shlex.join([*context.command_path.split(), *itertools.chain(*given.items())])
    print_note(strip_controls(f"More: {command}"))


def show_fields(answer: Row, fields: Mapping[str, Callable[[Row], Cell] | Cell | None]) -> None:
    """Prints names and values in two columns, without empty values, or with --json the answer.

    A value may be a function of the answer, as for the columns of a table.
    """
    if wants_json():
        return show_json(answer)
    values = {name: value(answer) if callable(value) else value for name, value in fields.items()}
    _print_block({name: _text(value) for name, value in values.items() if value not in (None, "")}, console())


def show_line(answer: Any, line: str) -> None:
    """Prints the line, or with --json the answer."""
    if wants_json():
        return show_json(answer)
    click.echo(line)


def show_value(answer: Row, name: str, note: str) -> None:
    """Prints the note, and only this field of the answer to stdout, or with --json the answer."""
    if wants_table():
        print_note(note)
    show_line(answer, strip_controls(str(answer[name])))


class Table:
    """Prints rows in columns, as `show_table` describes. `print_more` adds rows to a table on the screen."""

    def __init__(
        self, columns: Columns, *, prose: str = "", cut: Collection[str] = (), less: Collection[str] = ()
    ) -> None:
        self._columns, self._prose, self._cut, self._less = columns, prose, cut, less
        self._screen = console()
        self._widths: dict[str, int] = {}  # of the columns that are shown; empty if each row is a block of lines

    def print_rows(self, rows: Sequence[Row], *, empty_columns: bool = False) -> None:
        """Prints the rows below their headings. Columns without a value are left out, unless `empty_columns` is set."""
        cells = self._format_rows(rows)
        first = next(iter(self._columns))
        names = [name for name in self._columns if empty_columns or name == first or any(row[name] for row in cells)]
        self._widths = self._fit(names, cells)
        if not self._widths:
            return self._print_blocks(cells)
        headings = {name: _dim(name.upper()) for name in names}
        self._print_line({name: self._fold(headings[name], width) for name, width in self._widths.items()})
        self._print_cells(cells)
        if missing := [name for name in names if name not in self._widths]:
            print_note(f"The terminal is too narrow for: {', '.join(missing)}. All fields: --json")

    def print_more(self, rows: Sequence[Row]) -> None:
        """Prints rows below those that are on the screen."""
        cells = self._format_rows(rows)
        if self._widths:
            self._print_cells(cells)
        else:
            click.echo()
            self._print_blocks(cells)

    def _format_rows(self, rows: Sequence[Row]) -> list[dict[str, Text]]:
        return [{name: _text(cell(row)) for name, cell in self._columns.items()} for row in rows]

    def _fit(self, names: list[str], cells: list[dict[str, Text]]) -> dict[str, int]:
        """Returns the widths of the columns that fit, or nothing if even the least number does not fit."""
        longest = {name: max((row[name].cell_len for row in cells), default=0) for name in names}
        wanted = {name: max(longest[name], len(name)) for name in names}
        available = _find_width(self._screen)
        if available is None:
            return wanted
        folded = {name: max(longest[name], _longest_word(name)) for name in names}  # only headings are folded
        least = {name: self._find_least(name, folded[name], cells) for name in names}
        for name in ("", *self._less):
            least.pop(name, None)
            spare = available - sum(least.values()) - GAP_CELLS * (len(least) - 1)
            if spare >= 0:
                return _widen(least, spare, folded, wanted)
        return {}

    def _find_least(self, name: str, folded: int, cells: list[dict[str, Text]]) -> int:
        """Returns the minimum width of a column."""
        if name in self._cut:
            return min(folded, max(NAME_CELLS, _longest_word(name)))
        if name == self._prose:
            return min(folded, max(PROSE_CELLS, *(_longest_word(row[name].plain) for row in cells)))
        return folded

    def _print_cells(self, rows: list[dict[str, Text]]) -> None:
        for row in rows:
            parts = {}
            for name, width in self._widths.items():
                if name in self._cut:
                    row[name].truncate(width, overflow="ellipsis")
                parts[name] = self._fold(row[name], width) if name == self._prose else [row[name]]
            self._print_line(parts)

    def _fold(self, cell: Text, width: int) -> list[Text]:
        return list(cell.wrap(self._screen, width)) if cell.cell_len > width else [cell]

    def _print_line(self, parts: dict[str, list[Text]]) -> None:
        """Prints one row; each column has one or more lines."""
        widths = [self._widths[name] for name in parts]
        for line in itertools.zip_longest(*parts.values()):
            _print_cells(zip(line, widths, strict=True), self._screen)

    def _print_blocks(self, rows: list[dict[str, Text]]) -> None:
        for number, row in enumerate(rows):
            if number:
                click.echo()
            _print_block({name: cell for name, cell in row.items() if cell.plain}, self._screen)


def _find_width(screen: Console) -> int | None:
    """Returns the width of the terminal, or None for output that has any width."""
    return screen.width if screen.is_terminal or os.environ.get("COLUMNS", "").isdecimal() else None


def _widen(widths: dict[str, int], spare: int, *goals: Mapping[str, int]) -> dict[str, int]:
    """Returns the widths after giving `spare` cells to columns that are below a goal."""
    widths = dict(widths)
    for goal, name in itertools.product(goals, widths):
        more = min(spare, goal[name] - widths[name])
        widths[name], spare = widths[name] + more, spare - more
    return widths


def _longest_word(text: str) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, text.split()), default=0)


def _print_block(fields: Mapping[str, Text], screen: Console) -> None:
    """Prints a line for each field. A terminal that is too narrow wraps it itself, so a copy still has whole values."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        _print_cells([(_dim(name), width), (value, 0)], screen)


def _print_cells(cells: Iterable[tuple[Text | None, int]], screen: Console) -> None:
    """Prints a line of cells, each with its width."""
    from rich.text import Text

    line = Text()
    for cell, width in cells:
        line.append_text(cell or Text())
        line.append(" " * (GAP_CELLS + max(0, width - (cell.cell_len if cell else 0))))
    line.rstrip()
    with screen.capture() as captured:
        screen.print(line, soft_wrap=True)
    click.echo(captured.get().rstrip("\n"), color=screen.color_system is not None)


def _text(value: Cell | None) -> Text:
    from rich.text import Text

    return value if isinstance(value, Text) else Text(strip_controls(value or ""))


def _dim(text: str) -> Text:
    from rich.text import Text

    return Text(text, "dim")
