"""The cells of tables: functions that return the text of a row in one column, and the formats of values."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rich.text import Text

NANO_PER_EURO = 1_000_000_000
COLORS = {
    "green": ("live", "delivered", "operational"),
    "red": ("failed", "misconfigured", "provider-unreachable"),
    "yellow": ("dropped", "canceled", "quota-exhausted", "building", "checking", "canary"),
}
STYLES = {state: color for color, states in COLORS.items() for state in states}

Cell: TypeAlias = "str | Text"
Row = Mapping[str, Any]
Columns: TypeAlias = Mapping[str, Callable[[Row], Cell]]


# The first functions return the cell functions of a table's columns.


def text_of(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else str(row[name])


def texts(*names: str, **fields: str) -> dict[str, Callable[[Row], Cell]]:
    """Returns columns of texts: fields called like the column, and `column=field`, where _ in the column is a space."""
    return {
        name.replace("_", " "): text_of(field) for name, field in {**{name: name for name in names}, **fields}.items()
    }


def state_of(name: str) -> Callable[[Row], Text]:
    return lambda row: color_state(row.get(name))


def age_of(name: str, missing: str = "") -> Callable[[Row], str]:
    return lambda row: missing if row.get(name) is None else format_age(row[name])


def duration_of(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else format_duration(row[name])


# -- values -----------------------------------------------------------------------------------------------------


def nested_row(row: Row, name: str) -> Row:
    """Returns the object in this field, or an empty one."""
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def strip_controls(text: str) -> str:
    """Removes control characters, which could control a terminal. Newlines and tabs become spaces."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text.replace("\n", " ").replace("\t", " "))


def color_state(value: Any) -> Text:
    from rich.text import Text

    return Text.assemble((strip_controls(str(value or "")), STYLES.get(str(value), "")))


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
        return f"{format_count(seconds // 86_400, 'day')} ago"
    return f"{then.astimezone():%Y-%m-%d}"


def format_count(count: Any, noun: str) -> str:
    """Returns, for example, `1 day` or `3 days`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


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
        return format_count(count, "byte")
    if count < 1_048_576:
        return f"{count / 1024:.0f} KB"
    amount, unit = (count / 2**20, "MB") if count < 2**30 else (count / 2**30, "GB")
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def format_certificate(certificate: Row) -> str:
    issuer = f", issued by {certificate['issuer']}" if certificate.get("issuer") else ""
    return f"until {text_of('expiresAt')(certificate)}{issuer}" if certificate else ""


def format_spending(row: Row) -> str:
    return f"{format_euro(row.get('settled'))} of {format_euro(row.get('cap'))} EUR"


def format_euro(nano: Any) -> str:
    """Formats the exact amount with at least two decimals."""
    if not isinstance(nano, int):
        return str(nano)
    decimals = f"{abs(nano) % NANO_PER_EURO:09d}".rstrip("0").ljust(2, "0")
    return f"{'-' if nano < 0 else ''}{abs(nano) // NANO_PER_EURO}.{decimals}"
