"""Decodes text files that people write: in UTF-8, or as their byte order mark says, such as PowerShell's UTF-16."""

import codecs

# The mark of UTF-32 begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def decode_text(data: bytes, errors: str = "replace") -> str:
    """Returns the text without its mark. With `errors="strict"`, raises UnicodeDecodeError."""
    for mark, encoding in MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors)
    return data.decode(errors=errors)
