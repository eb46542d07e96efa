"""The pages' files: their headers, their sizes, the files that are served, and the contrast of their colors."""

import re
from itertools import product

import pytest

from gateway.api.assets import PAGES, bundles
from tests.support.gateway_process import Gateway
from tests.support.responses import refused
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")

STYLE = (PAGES / "shared" / "style.css").read_text()
OWN = {f"{each} 'self'" for each in ("script-src", "style-src", "font-src", "connect-src", "form-action")}
NONE = {f"{each} 'none'" for each in ("default-src", "base-uri", "frame-ancestors")}
POLICY = {*OWN, *NONE, "img-src 'self' data:"}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/dashboard", "text/html"),
        ("/ops", "text/html"),
        *((f"{page}.js", "text/javascript") for page in ("dashboard", "ops", "public")),
        *((f"{page}.css", "text/css") for page in ("dashboard", "public")),
        ("/pages/capsule.svg", "image/svg+xml"),
    ],
)
async def test_a_page_loads_only_our_own_files(gw: Gateway, path: str, kind: str) -> None:
    """Paths without a slash are names of bundled files, without their hash."""
    if not path.startswith("/"):
        stem, suffix = path.split(".")
        [path] = [f"/pages/{name}" for name in bundles().files if re.fullmatch(rf"{stem}\.\w{{12}}\.{suffix}", name)]
    response = await gw.http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == (kind if kind == "image/svg+xml" else f"{kind}; charset=utf-8")
    assert set(response.headers["content-security-policy"].split("; ")) == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in response.headers
    elsewhere = re.findall(r"""(?:src|href|url\(|from|import)[\s=("']+(?:https?:)?//[^\s"')]+""", response.text)
    assert not elsewhere


async def test_nothing_else_is_served(gw: Gateway) -> None:
    for path in (
        *("/pages/index.html", "/pages/ops", "/pages/style.css"),  # a template, a folder, and what is not bundled
        *("/pages/..%2fpublic%2findex.html", "/dashboard/%2e%2e/public.py", "/dashboard/..%5Cpublic.py"),
        *("/dashboard/%00", "/dashboard/" + "x" * 300, "/dashboard/page.js"),
    ):
        response = await gw.http.get(path)
        assert (response.status_code, response.text) == (404, "Not Found"), path


async def test_a_sessions_token_cannot_be_read(gw: Gateway, visitor: Visitor) -> None:
    refused(await gw.http.get("/dashboard/session"), 401, "UNAUTHORIZED")
    account = await gw.account()
    await visitor.log_in(account.key)
    session = await visitor.call("GET", "/dashboard/session")
    assert (session.json()["email"], session.json()["account"], session.json()["role"]) == (None, account.id, "owner")
    assert visitor.token not in session.text


def color(name: str, scheme: int) -> list[float]:
    values = re.search(rf"--{name}: light-dark\((#\w+), (#\w+)\)", STYLE)
    assert values, name
    digits = values[1 + scheme].removeprefix("#")
    return [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]


def luminance(name: str, scheme: int) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color(name, scheme)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
async def test_colors_have_enough_contrast(scheme: int) -> None:
    """WCAG AA: 4.5 to 1 for text, 3 to 1 for the edges of controls and for marks."""
    text, marks = ("ink", "quiet", "bad"), ("edge", "good", "warn", "busy", "accent")
    for ratio, names in ((4.5, text), (3.0, marks)):
        for name, ground in product(names, ("ground", "surface")):
            low, high = sorted((luminance(name, scheme), luminance(ground, scheme)))
            assert (high + 0.05) / (low + 0.05) >= ratio, (name, ground)
