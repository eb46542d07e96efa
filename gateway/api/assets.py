"""Bundles the files of the pages: one style sheet and one script per page, under names that contain a hash.

A page is an HTML file in a folder of `BUNDLED`. It names its style sheets and its one script by the addresses of
`FOLDERS`, such as `/docs/page.js`. The style sheets are joined, and the ES modules become one script: each module is
the body of a function that returns the module's exports. Nothing is rewritten beyond `import` and `export`, so the
modules must be written in the style of these pages: statements begin in the first column, imports come first, and only
constants, functions and classes are exported. Anything else is a BundleError.

The names are the same in all processes of a release. Browsers keep the files forever, and ask for the page itself each
time. While a new release starts, a page of one process may ask another for its files. That process does not know the
script, so it responds with one that reloads the page.
"""

import asyncio
import gzip
import hashlib
import mimetypes
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.datastructures import State
from litestar.exceptions import NotFoundException

PAGES = Path(__file__).parents[1] / "pages"
# The folders of an address that style sheets, modules and pages use.
FOLDERS = {
    "pages": (PAGES / "shared", PAGES / "public"),
    "dashboard": (PAGES / "dashboard",),
    "ops": (PAGES / "ops",),
    "docs": (PAGES / "docs",),
}
BUNDLED = ("dashboard", "docs", "ops", "public")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
NO_CACHE, FOREVER = "no-cache", "public, max-age=31536000, immutable"
COMPRESSED_FROM = 1024  # bytes; below, compression saves no packet
COMPRESSED_TYPES = ("text/", "image/svg", "application/json")
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2", ".webp": "image/webp"}

RELOAD = "setTimeout(() => location.reload(), 2000);\n"
# A style sheet of another release is missing. The script runs after the style sheets have arrived.
CHECK_STYLES = f'if (!document.querySelector("link[rel=stylesheet]").sheet) {RELOAD}'

_STYLE = re.compile(r'[ \t]*<link rel="stylesheet" href="([^"]+)" ?/?>\n')
_SCRIPT = re.compile(r'(?<=<script type="module" src=")([^"]+)(?="></script>)')
_MEDIA = re.compile(r"/(?:pages|dashboard|ops|docs)/[\w.-]+\.(?:svg|png|webp|woff2)\b")
_HEAD = re.compile(  # a line before the module's code: an import, a comment, or nothing
    r'import\s+(?:\{(?P<names>[\w$\s,]*)\}|\*\s+as\s+(?P<all>[\w$]+))\s+from\s+"(?P<source>[^"\n]+)";\n|(?://.*)?\n'
)
_EXPORT = re.compile(r"^export (?=(?:const|(?:async )?function(?: ?\*)?|class) ([\w$]+))", re.MULTILINE)
_OTHER = re.compile(r"^(?:import|export|await|for await)\b|\bimport(?:\(|\.meta\b)", re.MULTILINE)
_UNKNOWN_URL = re.compile(r"""^.*(?:@import\b|url\((?!["']?(?:data:|/))).*""", re.MULTILINE)
_ALIAS = re.compile(r"([\w$]+)(?:\s+as\s+([\w$]+))?")
_BUNDLE_NAME = re.compile(r"([a-z]+)\.[0-9a-f]{12}\.js")


class BundleError(Exception):
    """A file of the pages that this module cannot bundle, with the line."""

    def __init__(self, file: Path, line: int, reason: str) -> None:
        super().__init__(f"{file.parent.name}/{file.name}:{line}: {reason}")


class Asset(msgspec.Struct, frozen=True):
    body: bytes
    media_type: str
    caching: str
    compressed: bytes  # empty if compression does not help

    @property
    def tag(self) -> str:
        return f'W/"{digest(self.body)}"'  # weak, because it is the same with and without compression


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:12]


def make_asset(body: bytes, media_type: str, caching: str) -> Asset:
    compresses = len(body) >= COMPRESSED_FROM and media_type.startswith(COMPRESSED_TYPES)
    return Asset(body, media_type, caching, gzip.compress(body, mtime=0) if compresses else b"")


# -- modules -------------------------------------------------------------------------------------------------


def find_file(address: str, base: Path) -> Path | None:
    """Returns the file of an address, which may be relative to the folder `base`."""
    if address.startswith("./"):
        candidates = [base / address.removeprefix("./")]
    else:
        _, folder, *rest = address.split("/")
        candidates = [each / "/".join(rest) for each in FOLDERS.get(folder, ())]
    return next((file for file in candidates if file.is_file()), None)


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


class Bundler:
    """Joins the modules that one script imports, each after the modules that it imports itself."""

    def __init__(self) -> None:
        self._exports: dict[Path, set[str]] = {}
        self._waiting: list[Path] = []  # modules whose imports are being added
        self._parts: list[str] = []

    def bundle(self, entry: Path) -> str:
        """Returns the text of the script. Raises BundleError."""
        self._add(entry)
        return "".join(self._parts)

    def _add(self, file: Path) -> None:
        if file in self._exports:
            return
        self._waiting.append(file)
        text = file.read_text()
        bindings, end = [], 0
        while found := _HEAD.match(text, end):
            if found["source"]:
                bindings.append(self._bind(file, line_of(text, end), found))
            end = found.end()
        body = text[end:]
        exports = _EXPORT.findall(body)
        code = _EXPORT.sub("", body)
        if other := _OTHER.search(code):
            line = line_of(text, end) + code.count("\n", 0, other.start())
            raise BundleError(file, line, f"{other[0]} is not supported here")
        self._waiting.pop()
        self._exports[file] = set(exports)
        returned = f"return {{ {', '.join(exports)} }};\n" if exports else ""
        number = list(self._exports).index(file)
        self._parts.append(f"// {file.parent.name}/{file.name}\n")
        self._parts.append(f"const $module{number} = (() => {{\n{''.join(bindings)}{code}{returned}}})();\n")

    def _bind(self, file: Path, line: int, statement: re.Match[str]) -> str:
        """Adds the imported module. Returns the declaration that takes the place of the import."""
        target = find_file(statement["source"], file.parent)
        if target is None:
            raise BundleError(file, line, f"there is no file {statement['source']}")
        if target in self._waiting:
            raise BundleError(file, line, f"{statement['source']} imports this module, directly or indirectly")
        self._add(target)
        source = f"$module{list(self._exports).index(target)}"
        if statement["all"]:
            return f"const {statement['all']} = {source};\n"
        bindings = []
        for part in filter(None, (each.strip() for each in statement["names"].split(","))):
            alias = _ALIAS.fullmatch(part)
            if alias is None or alias[1] not in self._exports[target]:
                raise BundleError(file, line, f"{statement['source']} exports no {part}")
            bindings.append(f"{alias[1]}: {alias[2]}" if alias[2] else alias[1])
        return f"const {{ {', '.join(bindings)} }} = {source};\n"


# -- pages ---------------------------------------------------------------------------------------------------


class Bundles:
    """The pages' texts, and the files that they name. `pages` has the folders `bundled`."""

    def __init__(self, pages: Path = PAGES, bundled: Iterable[str] = BUNDLED) -> None:
        self.files: dict[str, Asset] = {}  # by the name below /pages/
        self.texts: dict[str, str | BundleError] = {}  # a page with an error leaves the others in service
        for folder in bundled:
            for page in sorted((pages / folder).glob("*.html")):
                name = folder if page.stem == "index" else page.stem
                try:
                    self.texts[name] = self._bundle(name, page)
                except BundleError as error:
                    self.texts[name] = error

    def _bundle(self, name: str, page: Path) -> str:
        text = page.read_text()
        styles = [self._locate(match[1], page, line_of(text, match.start())) for match in _STYLE.finditer(text)]
        sheet = self._store(name, ".css", "".join(map(self._read_style, styles)), page)
        links = iter([f'    <link rel="stylesheet" href="{sheet}" />\n'])
        text = _STYLE.sub(lambda _: next(links, ""), text)

        def bundle_script(match: re.Match[str]) -> str:
            entry = self._locate(match[1], page, line_of(text, match.start()))
            return self._store(name, ".js", CHECK_STYLES + Bundler().bundle(entry), page)

        return self._name_media(_SCRIPT.sub(bundle_script, text), page)

    def _locate(self, address: str, importer: Path, line: int) -> Path:
        file = find_file(address, importer.parent)
        if file is None:
            raise BundleError(importer, line, f"there is no file {address}")
        return file

    def _read_style(self, file: Path) -> str:
        text = file.read_text()
        if unknown := _UNKNOWN_URL.search(text):
            raise BundleError(file, line_of(text, unknown.start()), "this address is not supported")
        return text

    def _store(self, name: str, suffix: str, text: str, page: Path) -> str:
        return self._add(name, suffix, self._name_media(text, page).encode())

    def _add(self, name: str, suffix: str, body: bytes) -> str:
        file = f"{name}.{digest(body)}{suffix}"
        media_type = MEDIA_TYPES.get(suffix) or str(mimetypes.guess_type(file)[0])
        self.files[file] = make_asset(body, media_type, FOREVER)
        return f"/pages/{file}"

    def _name_media(self, text: str, page: Path) -> str:
        """Replaces the addresses of images and fonts with those that contain a hash."""

        def replace(match: re.Match[str]) -> str:
            file = self._locate(match[0], page, line_of(text, match.start()))
            address = self._add(file.stem, file.suffix, file.read_bytes())
            # Also under its own name, for pages that are not bundled.
            self.files[file.name] = msgspec.structs.replace(
                self.files[address.removeprefix("/pages/")], caching=NO_CACHE
            )
            return address

        return _MEDIA.sub(replace, text)


@cache
def bundles() -> Bundles:
    """Bundles all pages, once per process."""
    return Bundles()


async def bundle_pages() -> None:
    """Bundles all pages if this is the first request for one. A thread does it: streams must not wait for it."""
    if not bundles.cache_info().currsize:
        await asyncio.to_thread(bundles)


def page_text(name: str) -> str:
    """Returns a page with the addresses of its bundled files, after `bundle_pages`.

    `name` is the folder of an `index.html`, such as `docs`, or the name of another page without `.html`. If the page is
    a template, the caller fills it in. `html_response` makes the response. Raises BundleError.
    """
    text = bundles().texts[name]
    if isinstance(text, BundleError):
        raise text
    return text


def html_response(request: Request[Any, Any, State], text: str) -> Response[bytes]:
    """Returns the response with a page: compressed, with an ETag, and 304 if the browser has it."""
    return respond(request, _page(text))


@lru_cache(256)
def _page(text: str) -> Asset:
    return make_asset(text.encode(), "text/html", NO_CACHE)


def file_response(request: Request[Any, Any, State], name: str) -> Response[bytes]:
    """Returns the response with a bundled file, an image or a font. Raises NotFoundException."""
    bundled = bundles()
    asset = bundled.files.get(name)
    if asset is None and (match := _BUNDLE_NAME.fullmatch(name)) and match[1] in bundled.texts:
        asset = make_asset(RELOAD.encode(), MEDIA_TYPES[".js"], "no-store")
    if asset is None:
        raise NotFoundException
    return respond(request, asset)


def respond(request: Request[Any, Any, State], asset: Asset) -> Response[bytes]:
    headers = {**HEADERS, "cache-control": asset.caching, "etag": asset.tag}
    if asset.compressed:
        headers["vary"] = "Accept-Encoding"
    if asset.tag in [each.strip() for each in request.headers.get("if-none-match", "").split(",")]:
        return Response(b"", status_code=304, media_type=asset.media_type, headers=headers)
    body = asset.body
    if asset.compressed and accepts_gzip(request.headers.get("accept-encoding", "")):
        body, headers["content-encoding"] = asset.compressed, "gzip"
    return Response(body, media_type=asset.media_type, headers=headers)


def accepts_gzip(header: str) -> bool:
    choices = [each.replace(" ", "").lower().split(";") for each in header.split(",")]
    return any(name == "gzip" and not re.fullmatch(r"q=0(\.0*)?", "".join(rest)) for name, *rest in choices)
