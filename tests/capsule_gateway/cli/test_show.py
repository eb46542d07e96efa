"""The command line prints tables that fit the terminal, and CSV."""

from collections.abc import Callable

import pytest

from capsule_gateway.cli.cells import text_of
from capsule_gateway.cli.show import Table, show_csv

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
