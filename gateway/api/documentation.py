"""Serves the documents as pages at /docs, and an index of them for the page's search.

The documents are Markdown files of the repository, which the wheel contains too.
"""

import asyncio
import html
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import msgspec
from litestar import Request, Response, route
from litestar.datastructures import State
from markdown_it import MarkdownIt
from markdown_it.token import Token

from gateway.api import reference
from gateway.api.assets import NO_CACHE, Asset, bundle_pages, html_response, make_asset, page_text, respond
from gateway.api.pages import READ
from gateway.services import Injected
from gateway.settings import Settings

ROOT = Path(__file__).parents[2]  # of the repository, or of the installed package
INDEX = "docs/README.md"
ELSEWHERE = {  # documents outside `docs`, with the last part of their address
    "README.md": "tour",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "bench/README.md": "benchmarks",
    "capsule/README.md": "browser-module",
    "ops/kubernetes/README.md": "kubernetes",
}
REFERENCE = "reference"
EXAMPLE = "https://api.example.com"  # stands for the service's own address


class Section(NamedTuple):
    """A heading of a document and the text below it."""

    level: int
    anchor: str
    title: str
    text: str


class Document(NamedTuple):
    title: str
    content: str  # HTML
    sections: list[Section]


def address_of(source: str) -> str:
    """Returns the address of a document's page."""
    name = ELSEWHERE.get(source) or Path(source).stem
    return "/docs" if source == INDEX else f"/docs/{name}"


@cache
def sources() -> dict[str, str]:
    """Returns the file of each document by the address of its page."""
    names = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))]
    return {address_of(name): name for name in (*names, *ELSEWHERE)}


# -- Markdown -----------------------------------------------------------------------------------------------------


@cache
def render_document(source: str) -> Document:
    """Renders a document. Its headings get anchors, and its links lead to the pages of other documents."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse((ROOT / source).read_text())
    sections = list(_read_sections(tokens))
    for token in tokens:
        if token.type == "inline":
            _change_links(source, token.children or [])
        elif token.type == "fence":
            token.info = ""  # browsers need no name of the language
    content = reader.renderer.render(tokens, reader.options, {})
    content = content.replace("<th></th>", "<td></td>")  # an empty heading would be announced with each cell
    content = content.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")
    return Document(sections[0].title, content.replace("<pre>", '<pre tabindex="0">'), sections)


def _read_sections(tokens: Sequence[Token]) -> Iterator[Section]:
    """Yields the sections, and gives their headings anchors, as GitHub makes them."""
    level, title, anchor = 1, "", ""
    text, used = list[str](), set[str]()
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            if title:
                yield Section(level, anchor, title, " ".join(text))
            level, title, text = int(token.tag[1]), _plain(following), []
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            while anchor in used:
                anchor += "-1"
            used.add(anchor)
            token.attrSet("id", anchor)
        elif token.type == "inline" and _plain(token) != title:
            text.append(_plain(token))
        elif token.type in ("fence", "code_block"):
            text.append(token.content)
    yield Section(level, anchor, title, " ".join(text))


def _plain(token: Token) -> str:
    return "".join(" " if part.type == "softbreak" else part.content for part in token.children or [])


def _change_links(source: str, parts: list[Token]) -> None:
    """Makes links lead to pages. A link to a file that has no page becomes plain text, and an image disappears."""
    plain = False
    for part in parts:
        if part.type == "link_open":
            target = _resolve(source, str(part.attrGet("href")))
            plain = target is None
            part.attrSet("href", target or "")
            if plain:
                part.tag, part.attrs = "span", {}
        elif part.type == "link_close" and plain:
            part.tag, plain = "span", False
        elif part.type == "image":
            part.type, part.content, part.children = "text", "", []


def _resolve(source: str, target: str) -> str | None:
    if re.match(r"https?:|#|/", target):
        return target
    path, _, anchor = target.partition("#")
    file = (ROOT / source).parent.joinpath(path).resolve()
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else ""
    if name in ("docs", "docs/"):
        name = INDEX
    page = address_of(name)
    if sources().get(page) != name:
        return None
    return f"{page}#{anchor}" if anchor else page


# -- pages --------------------------------------------------------------------------------------------------------


@cache
def menu() -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns the groups of pages with the titles and addresses that the index gives them."""
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    for line in (ROOT / INDEX).read_text().splitlines():
        if line.startswith("## "):
            groups.append((line[3:], []))
        found = re.match(r"\| \[([^\]]+)\]\(([^)]+)\)", line)
        if found and (target := _resolve(INDEX, found[2])) is not None:
            groups[-1][1].append((found[1], target))
        if line == "## Reference":
            groups[-1][1].append(("API operations", f"/docs/{REFERENCE}"))
    return groups


def _render_menu(address: str) -> str:
    parts = []
    for title, pages in menu():
        links = "".join(
            f'<li><a href="{page}"{" aria-current=page" if page == address else ""}>{html.escape(name)}</a>'
            for name, page in pages
        )
        parts.append(f"<p>{html.escape(title)}</p><ul>{links}</ul>")
    return "".join(parts)


@cache
def render_page(address: str, base_url: str, schema: bytes = b"") -> str:
    """Returns the page at an address. In its examples, the service has its own address."""
    if schema:
        page = reference.render(msgspec.json.decode(schema))
        title, content, sections = page.title, page.content, [Section(2, *entry, "") for entry in page.sections]
    else:
        title, content, sections = render_document(sources()[address])
    listed = [section for section in sections if section.level == 2]
    links = "".join(f'<li><a href="#{s.anchor}">{html.escape(s.title)}</a>' for s in listed)
    return Template(page_text("docs")).substitute(
        title=html.escape(title),
        pages=_render_menu(address),
        content=content.replace(EXAMPLE, html.escape(base_url)),
        sections=f"<p>On this page</p><ul>{links}</ul>" if len(listed) > 1 else "",
    )


@cache
def search_index(base_url: str) -> Asset:
    """Returns each section of each document as [address, page's title, section's title, text]."""
    entries = []
    for address, source in sources().items():
        page = render_document(source)
        for section in page.sections:
            anchor = "" if section.level == 1 else f"#{section.anchor}"
            entries.append([address + anchor, page.title, section.title, section.text.replace(EXAMPLE, base_url)])
    return make_asset(msgspec.json.encode(entries), "application/json", NO_CACHE)


async def send_page(
    request: Request[Any, Any, State], address: str, base_url: str, schema: bytes = b""
) -> Response[bytes]:
    """Returns the response with the page at an address. A thread renders it: streams must not wait for it."""
    await bundle_pages()
    return html_response(request, await asyncio.to_thread(render_page, address, base_url, schema))


@route([address for address in sources() if address != "/docs"], http_method=READ, include_in_schema=False)
async def documentation(request: Request[Any, Any, State], settings: Injected[Settings]) -> Response[bytes]:
    """A page of the documentation."""
    return await send_page(request, request.url.path, settings.base_url)


@route("/docs/search.json", http_method=READ, include_in_schema=False)
async def search(request: Request[Any, Any, State], settings: Injected[Settings]) -> Response[bytes]:
    """The index of the documentation's search."""
    return respond(request, await asyncio.to_thread(search_index, settings.base_url))


ROUTES = [documentation, search]
