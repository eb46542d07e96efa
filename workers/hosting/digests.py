"""Marks the files of a release whose names contain a digest of their content, when it is made.

    files/assets/index-GpEN3EET.js
    immutable/assets/index-GpEN3EET.js    an empty file: browsers may keep the other one for a year (`Caddyfile`)

The file `by-tool` in a release says that a recognized tool has written its files. Then such a name may be in any
folder, and otherwise in those of well-known tools.

Nobody can take back what a browser keeps. So a name counts only if no person writes such a name.
"""

import os
import re
from pathlib import Path

FOLDER, BY_TOOL = "immutable", "by-tool"
_TOOL_FOLDER = re.compile(r"(?:^|/)(?:assets|static|_astro|_nuxt|_next/static|_app/immutable|build)/")
_PAGE = re.compile(r"\.x?html?$", re.IGNORECASE)  # has an address that people know
# The last part before the extension. Two tools write names that consist of nothing else.
_LAST_PART = re.compile(r"(?:[.-]|(?:^|/)(?:_nuxt|_next/static/\w+)/)(\w{8,40})\.[^./]+$", re.ASCII)
_DATE_OR_SIZE = re.compile(r"(?<!\d)(?:19|20)\d\d(?:\d\d){0,2}(?!\d)|\d\d[xX]\d\d", re.ASCII)
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_HEX_WORDS = re.compile(r"[a-fA-F]*[0-9]*[a-fA-F]*")  # such as `face2face`
_WORD = re.compile(r"[A-Z][a-z]{2}|[a-z]{3}|[A-Z]{3}")
# Such as `Version2`, `iPhone15Pro` or `IMG_0042b`.
_WORDS = re.compile(
    r"(?:(?>[A-Z]?[a-z]{2,}|[A-Z]{2,}(?![a-z])|[A-Z][aeiouy]|[AEIOUY][a-z]"
    r"|[A-Za-z]?[0-9]+[A-Za-z]?(?![a-z])|i(?=[A-Z])|_))+"
)


def mark_digests(release: Path) -> None:
    top, by_tool = release / "files", (release / BY_TOOL).exists()
    for folder, _, names in os.walk(top):
        for name in names:
            path = Path(folder, name).relative_to(top).as_posix()
            if has_digest(path) and (by_tool or _TOOL_FOLDER.search(path)):
                mark = release / FOLDER / path
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()


def has_digest(path: str) -> bool:
    """Returns whether the name of a file contains a digest. Without certainty, it contains none."""
    found = _LAST_PART.search(path)
    if found is None or _PAGE.search(path) or _DATE_OR_SIZE.search(part := found[1]):
        return False
    if not re.search("[0-9]", part):
        return False
    if _HEX.fullmatch(part):
        return _HEX_WORDS.fullmatch(part) is None
    is_mixed = re.search("[a-z]", part) and re.search("[A-Z]", part)
    return bool(is_mixed) and not (_WORDS.fullmatch(part) and _WORD.search(part))
