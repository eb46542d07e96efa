"""The command line formats values for people."""

import datetime
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_gateway.cli.show import (
    Table,
    format_age,
    format_duration,
    format_euro,
    format_size,
    show_csv,
    strip_controls,
    text_of,
)

NOW = datetime.datetime(2026, 7, 2, 12, 0, 0, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("then", "text"),
    [
        ("2026-07-02T12:00:30.000Z", "just now"),  # the service's clock is ahead
        ("2026-07-02T11:59:55.000Z", "just now"),
        ("2026-07-02T11:59:18.000Z", "42 s ago"),
        ("2026-07-02T11:57:00.000Z", "3 min ago"),
        ("2026-07-02T09:10:00.000Z", "2 h ago"),
        ("2026-07-01T11:00:00.000Z", "1 day ago"),
        ("2026-06-26T11:00:00.000Z", "6 days ago"),
        ("2026-06-20T12:00:00.000Z", "2026-06-20"),
        ("soon", "soon"),
        (7, "7"),
    ],
)
def test_ago(then: object, text: str) -> None:
    assert format_age(then, NOW) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(0, "0 ms"), (999, "999 ms"), (1000, "1.0 s"), (59_949, "59.9 s"), (59_950, "1 min 0 s"), (125_400, "2 min 5 s")],
)
def test_duration(milliseconds: int, text: str) -> None:
    assert format_duration(milliseconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (102_400, "100 KB"),
        (104_857_600, "100 MB"),
        (2_684_354_560, "2.5 GB"),
        (4_294_967_296, "4 GB"),
    ],
)
def test_size(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("nano", "text"),
    [(0, "0.00"), (50_000_000, "0.05"), (2_000_000_000, "2.00"), (1, "0.000000001"), (1_234_500_000, "1.2345")],
)
def test_euro(nano: int, text: str) -> None:
    assert format_euro(nano) == text


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert strip_controls(text).isprintable() or not {
        c for c in strip_controls(text) if ord(c) < 32 or 127 <= ord(c) < 160
    }


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


def test_headings_are_folded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "14")
    Table({"tokens in": text_of("i"), "tokens out": text_of("o")}).print_rows([{"i": "7", "o": "30"}])
    assert capsys.readouterr().out.splitlines() == ["TOKENS  TOKENS", "IN      OUT", "7       30"]


def test_csv(capsys: pytest.CaptureFixture[str]) -> None:
    show_csv([{"a": "x,y", "b": None, "c": 1}, {"a": "=1+1", "c": {"d": True}, "e": "z\x1b[31m"}])
    assert capsys.readouterr().out.splitlines() == ["a,b,c,e", '"x,y",,1,', '\'=1+1,,"{""d"": true}",z[31m']
    show_csv([])
    assert capsys.readouterr().out == ""
