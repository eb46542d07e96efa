"""Faults of TOML, which all have a line."""

import time
import tomllib

import pytest

from gateway.settings.toml import parse_toml


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a = 1\nb = " + "9" * 5_000, "A number has too many digits (at line 2, column 1)"),
        ('a = "' + "9" * 5_000 + '"  # ' + "9" * 5_000 + "\nb = [\n+" + "9_" * 5_000 + "9]", "(at line 3, column 1)"),
        ("a = " + "[" * 20_000, "Values are nested too deeply (at line 1, column 1)"),
        ("\n\n" + "a." * 40 + "a = 1", "Values are nested too deeply (at line 3, column 1)"),
        (
            'x = """\n#\n"""  # a."\n[[ ' + "'a' . b\t." * 20 + "a]]",
            "Values are nested too deeply (at line 4, column 1)",
        ),
        ("x = [{a = 1, " + '"a".' * 40 + "a = 1}]", "Values are nested too deeply (at line 1, column 1)"),
        ("x = '''\n\"\n'''\ny = " + "1" * 5_000, "A number has too many digits (at line 4, column 1)"),
        ('x = """\n' + "9" * 5_000 + '\n"""\ny = ' + "1" * 5_000, "(at line 4, column 1)"),
        ("a = ", "Invalid value (at end of document)"),
    ],
)
def test_faults(text: str, fault: str) -> None:
    with pytest.raises(tomllib.TOMLDecodeError) as raised:
        parse_toml(text)
    assert fault in str(raised.value)


NIBBLES = ".".join("0123456789abcdef0123456789abcdef") + ".ip6.arpa"


@pytest.mark.parametrize(
    "text",
    [
        f'name = "{NIBBLES}"',
        f'name = """\n{NIBBLES}\n[{NIBBLES}\n"""',
        f'names = [\n"{NIBBLES}",\n# {NIBBLES}\n"{NIBBLES}"]',
        f'name = "a"  # [{NIBBLES}',
        "# " + " ".join(f"{number}." for number in range(1, 34)),
        f'"{NIBBLES}" = 1',
        "a = 0x" + "f" * 5_000,
    ],
)
def test_points_in_values_and_comments(text: str) -> None:
    assert parse_toml(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "'''\n\"" + '\\"' * 500_000 + "\n'''",
        "'''\n" + "\"'\n" * 300_000 + "'''",
        "'''\n" + ("9" * 4_000 + "\n") * 250 + "'''",
        "1\n" + "".join(f"b{number} = {'9' * 4_000}\n" for number in range(50)) + "c = 1",
        "1  # " + "[ a." * 250_000,
    ],
)
def test_no_text_takes_long(text: str) -> None:
    began = time.thread_time()
    with pytest.raises(tomllib.TOMLDecodeError, match="too many digits"):
        parse_toml(f"x = {text}\ny = " + "1" * 5_000)
    assert time.thread_time() - began < 0.8
