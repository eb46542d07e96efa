"""The bundles of the pages: what the bundler joins and what it refuses, and their responses over HTTP."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.api import assets
from gateway.api.assets import BundleError, Bundler
from tests.support.gateway_process import Gateway

LIMIT = 200_000  # bytes of a page and its files, as transferred


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(assets.FOLDERS, "pages", (tmp_path,))
    return tmp_path


def bundle(folder: Path, **modules: str) -> str:
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text)
    return Bundler().bundle(folder / "page.js")


def run(script: str, folder: Path) -> str:
    """Returns what a script logs."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs the Debian package nodejs")
    file = folder / "bundle.mjs"
    file.write_text(script)
    return subprocess.run([node, file], capture_output=True, text=True, check=True, timeout=20).stdout


def test_names_of_modules_do_not_collide(write: Path) -> None:
    """And a module runs once, after those that it imports."""
    script = bundle(
        write,
        page='// A page.\n\nimport { a, b as c } from "./one.js";\nimport * as two from "/pages/two.js";\n'
        "const hidden = 3;\nconsole.log(a, c(), two.hidden, hidden, typeof two.absent);\n",
        one='import {\n  hidden as theirs,\n} from "./two.js";\n\nconsole.log("one");\nexport const a = theirs + 1;\n'
        "const hidden = 2;\nexport function b() {\n  return hidden;\n}\n",
        two='console.log("two");\nexport const hidden = 9;\nexport class Kind {}\nexport async function* each() {}\n',
    )
    assert run(script, write) == "two\none\n10 2 9 3 undefined\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('import { x } from "./other.js"\n', 1),
        ('import { y } from "./other.js";\n', 1),
        ('import { x } from "https://elsewhere.test/other.js";\n', 1),
        ('const a = 1;\nimport { x } from "./other.js";\n', 2),
        ("const a = 1;\n\nexport default a;\n", 3),
        ('export * from "./other.js";\n', 1),
        ('const a = () =>\n  import("./other.js");\n', 2),
        ("await null;\n", 1),
    ],
)
def test_other_syntax_is_refused_with_its_line(write: Path, text: str, line: int) -> None:
    with pytest.raises(BundleError, match=rf"page\.js:{line}: "):
        bundle(write, page=text, other="export const x = 1;\n")


# -- responses -----------------------------------------------------------------------------------------------

over_http = pytest.mark.asyncio(loop_scope="session")
BROWSER = {"Accept-Encoding": "gzip, br"}


async def load(gw: Gateway, page: str) -> dict[str, int]:
    """Returns the addresses that a page loads, and the bytes transferred for each."""
    sizes: dict[str, int] = {}
    waiting = [page]
    while waiting:
        address = waiting.pop()
        if address in sizes:
            continue
        response = await gw.http.get(address, headers=BROWSER)
        assert response.status_code == 200, address
        sizes[address] = response.num_bytes_downloaded
        if response.headers["content-type"].startswith(("text/html", "text/css")):
            waiting += re.findall(r"""["' (,](/pages/[\w.-]+)""", response.text)
    return sizes


@over_http
async def test_a_page_is_one_style_sheet_and_one_script_and_small(gw: Gateway) -> None:
    for page in ("/", "/dashboard", "/ops", "/docs"):
        sizes = await load(gw, page)
        assert [sum(address.endswith(suffix) for address in sizes) for suffix in (".css", ".js")] == [1, 1]
        assert sum(sizes.values()) < LIMIT, sizes
        assert all(re.fullmatch(r"/pages/[\w-]+\.[0-9a-f]{12}\.\w+", address) for address in sizes if address != page)


@over_http
async def test_browsers_ask_for_a_page_each_time_and_keep_its_files(gw: Gateway) -> None:
    """HEAD has the headers of GET, and texts are compressed for browsers that accept it."""
    first, *files = await load(gw, "/dashboard")
    for address in (first, *files):
        response = await gw.http.get(address, headers=BROWSER)
        forever = "public, max-age=31536000, immutable"
        assert response.headers["cache-control"] == ("no-cache" if address == first else forever)
        tag = response.headers["etag"]
        for known in (tag, f'"other", {tag}'):
            again = await gw.http.get(address, headers={**BROWSER, "If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert again.headers["content-security-policy"] == response.headers["content-security-policy"]
        other = await gw.http.get(address, headers={**BROWSER, "If-None-Match": 'W/"0"'})
        assert (other.status_code, other.content) == (200, response.content)
        head = await gw.http.head(address, headers=BROWSER)
        assert (head.status_code, head.content) == (200, b"")
        varying = {"date": "", "x-request-id": ""}
        assert {**head.headers, **varying} == {**response.headers, **varying}
        plain = await gw.http.get(address, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == response.content
        if address == first or address.endswith((".js", ".css")):
            assert response.headers["content-encoding"] == "gzip"
            assert response.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"
            assert response.num_bytes_downloaded < plain.num_bytes_downloaded / 2


@over_http
async def test_the_script_of_another_release_reloads_the_page(gw: Gateway) -> None:
    response = await gw.http.get("/pages/dashboard.0123456789ab.js")
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["content-type"] == "text/javascript; charset=utf-8"
    assert response.text == assets.RELOAD
    for name in ("dashboard.0123456789ab.css", "nothing.0123456789ab.js", "dashboard.js"):
        assert (await gw.http.get(f"/pages/{name}")).status_code == 404
