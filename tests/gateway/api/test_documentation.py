"""The documentation's pages: what they link to, whose address they show, and their sizes."""

import re

import pytest

from gateway.api.documentation import menu, render_document, sources
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

ADDRESSES = [*sources(), "/docs/reference"]


async def test_each_page(gw: Gateway) -> None:
    files = set[str]()
    for address in ADDRESSES:
        response = await gw.http.get(address)
        assert response.status_code == 200, address
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'; script-src 'self'" in response.headers["content-security-policy"]
        assert "https://api.example.com" not in response.text
        assert response.text.count("<h1") == 1, address
        assert not re.findall(r"<script(?! type=\"module\" src=)|\sstyle=|\son\w+=\"", response.text), address
        files |= set(re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="([^"#]+)"', response.text))
    for file in files:
        assert file.startswith("/"), file
        assert (await gw.http.get(file)).status_code == 200, file
    assert (await gw.http.get("/docs/nothing")).status_code == 404
    assert "<script" not in render_document("docs/security.md").content
    sections = (await gw.http.get("/docs/search.json")).json()
    found = {address.partition("#")[0] for address, *_, text in sections if "refund" in text.lower()}
    assert "/docs/not-offered" in found


async def test_links_lead_to_pages_and_headings(gw: Gateway) -> None:
    pages = {address: (await gw.http.get(address)).text for address in ADDRESSES}
    anchors = {address: set(re.findall(r' id="([^"]+)"', page)) for address, page in pages.items()}
    others = {"/", "/dashboard", "/docs/openapi.json", "/docs/capsule.schema.json"}
    for address, page in pages.items():
        for link in re.findall(r'<a [^>]*href="([/#][^"]*)"', page):
            target, _, anchor = link.partition("#")
            target = target or address
            assert target in others or target in pages, (address, link)
            assert not anchor or anchor in anchors[target], (address, link)


async def test_the_first_page_is_for_account_holders(gw: Gateway) -> None:
    """It needs no clone of the service."""
    assert {target.partition("#")[0] for _, pages in menu() for _, target in pages} == {*ADDRESSES} - {"/docs"}
    page = (await gw.http.get("/docs")).text.partition("<main")[2].partition("</main>")[0]
    assert f"curl -fsSL {gw.address}/install.sh | sh" in page.partition("<h2")[0]
    assert "make run" not in page
