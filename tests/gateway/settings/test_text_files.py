"""Text files are read by their byte order mark."""

import codecs

import pytest

from gateway.settings.text_files import decode_text, read_variables

TEXT = "flask==3.0\r\n# für Größe 😀\n"


def test_the_mark_says_how_a_text_is_encoded() -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        assert decode_text(TEXT.encode(encoding), "strict") == TEXT
    for mark, encoding in ((codecs.BOM_UTF16_BE, "utf-16-be"), (codecs.BOM_UTF32_BE, "utf-32-be")):
        assert decode_text(mark + TEXT.encode(encoding), "strict") == TEXT
    assert [decode_text(mark) for mark in (b"", codecs.BOM_UTF8, codecs.BOM_UTF16_LE)] == [""] * 3


@pytest.mark.parametrize("data", [b"a\xffb", codecs.BOM_UTF16_LE + b"a", codecs.BOM_UTF16_LE + b"\x00\xd8"])
def test_what_is_no_text(data: bytes) -> None:
    assert "\ufffd" in decode_text(data)
    with pytest.raises(UnicodeDecodeError):
        decode_text(data, "strict")


def test_variables() -> None:
    text = "# a comment\n\nexport A=1\n  B = 'two words' \nC=\nD=\"x\nE=a=b # c\n"
    assert read_variables(text) == {"A": "1", "B": "two words", "C": "", "D": '"x', "E": "a=b # c"}
    with pytest.raises(ValueError, match=r"^line 2: use NAME=value$"):
        read_variables("A=1\na secret\n")
