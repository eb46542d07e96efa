"""`_redirects` and `_headers` of static apps, compiled and followed by a real Caddy."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.ids import new_id
from tests.support.folders import passable_folder
from tests.support.hosted_apps import Hosting
from workers.hosting.rules import (
    HEADER_CHARACTERS,
    HEADERS,
    MAX_BYTES,
    MAX_HEADERS,
    MAX_PATTERNS,
    MAX_REDIRECTS,
    REDIRECTS,
    compile_rules,
    explain_problems,
    parse_headers,
    parse_redirects,
)

RULES = """
# moved pages
/old                 /new
/old-302             /new              302   # a remark
/old-308             https://new.example/page?a=1  308
/blog/*              /news/:splat      301
/posts/:year/:slug   /archive/:year/:slug.html?from=:slug#top  307
/out/*               https://other.example/:splat  303
/top/*               /:splat           301
/api/:id             /data/:id.json    200
/about               /other.html       200
/forced              /other.html       200!
/gone/*              /gone.html        410
/lost                /nowhere.html     404
/say/"quo`ted"       /a"b{{.}}`c       301
/ü                   /ö                301
/app/*               /index.html       200
"""
RULES_FOR_HEADERS = """
/*
  X-Frame-Options: DENY
  X-Quoted: "a" {{.}} `b`
  Link: </a.css>; rel=preload
  Link: </b.css>; rel=preload
/assets/*
  Cache-Control: public, max-age=60
  ! X-Frame-Options
/data/:id.json
  Access-Control-Allow-Origin: *
  Content-Type: application/vnd.api+json
/about
  X-Content-Type-Options: sniff
/*.txt
  X-Text: yes
"""
FILES: dict[str, str | bytes] = {
    "index.html": "home",
    "new.html": "new",
    "other.html": "other",
    "about.html": "about",
    "forced.html": "forced",
    "gone.html": "gone for good",
    "old.html": "there is a file, and the redirect still counts",
    "data/7.json": "{}",
    "assets/index-GpEN3EET.js": "1",
    "assets/plain.js": "2",
    "a.txt": "text",
    "404.html": "nothing here",
    "docs/_redirects": "an ordinary file",
    REDIRECTS: RULES.replace("\n", "\r\n").encode("utf-16"),  # as PowerShell writes them
    HEADERS: RULES_FOR_HEADERS.replace("\n", "\r\n").encode("utf-8-sig"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosting() -> AsyncIterator[Hosting]:
    with passable_folder() as folder:
        hosting = Hosting(folder)
        assert compile_rules(hosting.publish("dep_1", FILES).release("dep_1")) == []
        async with hosting.served():
            yield hosting


@pytest.mark.parametrize(
    ("path", "status", "location"),
    [
        ("/old", 301, "/new"),
        ("/old-302", 302, "/new"),
        ("/old-308?x=1", 308, "https://new.example/page?a=1"),
        ("/blog/2024/a%20b%0d%0aSet-Cookie:x%3f", 301, "/news/2024/a%20b%0D%0ASet-Cookie:x%3F"),
        ("/posts/2024/it%26s", 307, "/archive/2024/it%26s.html?from=it%26s#top"),
        ("/posts/20%2f24/a&b+c", 307, "/archive/20%2f24/a&b+c.html?from=a%26b%2Bc#top"),
        ("/%62log/100%25/%2525/(a)%28b%29/C%2B%2b", 301, "/news/100%25/%2525/(a)%28b%29/C%2B%2b"),
        ("/blog%2fa%2Fb", 301, "/news/a%2Fb"),
        ("/blog", 301, "/news/"),
        ("/blog/a/?x=%2F", 301, "/news/a/?x=%2F"),
        ("/old/", 301, "/new"),
        ("/out//evil.example", 303, "https://other.example/evil.example"),
        ("/top//evil.example", 301, "/evil.example"),
        ("/top/%2fevil.example", 301, "/%2fevil.example"),
        ('/say/"quo`ted"', 301, "/a%22b%7B%7B.%7D%7D%60c"),
        ("/%c3%bc", 301, "/%C3%B6"),
    ],
)
async def test_redirects(hosting: Hosting, path: str, status: int, location: str) -> None:
    said = await hosting.ask(path)
    assert (said.status, said.headers["location"], said.body) == (status, location, b"")
    assert said.headers["cache-control"] == "no-cache"
    assert "set-cookie" not in said.headers
    assert not [name for name in said.headers if name.lower().startswith("capsule-")]


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/api/7", 200, "{}"),
        ("/about", 200, "about"),
        ("/forced", 200, "other"),
        ("/gone/a/b", 410, "gone for good"),
        ("/lost", 404, "Not Found\n"),
        ("/app/some/page.js", 200, "home"),
        ("/docs/_redirects", 200, "an ordinary file"),
        (f"/{REDIRECTS}", 404, "nothing here"),
        (f"/{HEADERS}", 404, "nothing here"),
        ("/app/.env", 404, "Not Found\n"),
        ("/posts/2024", 404, "nothing here"),
    ],
)
async def test_rewrites_and_files(hosting: Hosting, path: str, status: int, body: str) -> None:
    # A browser that has an error page already must get it again.
    for more in ((), ("If-None-Match: *", "Range: bytes=0-0")) if status != 200 else ((),):
        said = await hosting.ask(path, *more)
        assert (said.status, said.body.decode()) == (status, body)
        assert not [name for name in said.headers if name.lower().startswith("capsule-")]


LOST = {
    "index.html": "home",
    "404.html": "lost",
    "en/about.html": "about",
    "en/404.html": "lost in english",
    "shut/index.html": "shut",
    "left.html": "left",
    REDIRECTS: "/shut/* /404 410!\n/left /en/ 410\n/en/* /en/404.html 404\n/* /404.html 404",
}
# A rule may name a page with or without the slash at the end, and with what the visitor has sent.
REWRITTEN = {
    "docs/index.html": "docs",
    "about.html": "about",
    "100% a?b/index.html": "odd",
    REDIRECTS: "/a /docs 200\n/b /about/ 200\n/c/* /:splat 200\n/about/ /docs 200",
}
LOOPS = {
    "all/index.html": "all",
    REDIRECTS: "/blog/* /blog 301\n/blog /never 301\n/all/* /all/index.html 302\n/all/* /rest 302",
}
# They count in their order, wherever their first part is: before and after lines without a pattern, and those that may
# match any path.
ORDERED = {
    "kept.html": "kept",
    "b/kept.html": "own",
    REDIRECTS: """
/a/1        /one
/:any/2     /two
/a/:n       /n/:n
/a/3        /never
/b/*        /kept.html   200
/b/kept     /other       301
/b/new      /never       301
/*          /rest/:splat 302
""",
}


@pytest.mark.parametrize(
    ("files", "answers"),
    [
        (LOST, {"/": "home", "/en/about": "about", "/left": "left", "/en/none": "404 lost in english"}),
        (LOST, {"/none": "404 lost", "/shut": "410 lost", "/shut/": "410 lost", "/en/about/": "308 /en/about"}),
        (REWRITTEN, {"/a": "docs", "/a/": "docs", "/b": "about", "/c/100%25%20a%3fb": "odd", "/about/": "308 /about"}),
        (LOOPS, {"/blog/a": "301 /blog", "/blog": "301 /never", "/all/x": "302 /all/index.html"}),
        (LOOPS, {"/all/index.html": "302 /rest"}),
        (ORDERED, {"/a/1": "301 /one", "/a/2": "301 /two", "/x/2": "301 /two", "/a/3": "301 /n/3"}),
        (ORDERED, {"/b/kept": "301 /other", "/b/new": "kept", "/": "302 /rest/", "/a": "302 /rest/a"}),
    ],
)
async def test_rules_together(hosting: Hosting, files: dict[str, str | bytes], answers: dict[str, str]) -> None:
    """None hides a file that its line leaves alone, and none leads to its own address."""
    deploy = new_id("dep")
    site = hosting.publish(deploy, files, "together.apps.test", app_id="together")
    assert compile_rules(site.release(deploy)) == []
    for path, answer in answers.items():
        said = await hosting.ask(path, "Accept: text/html", host="together.apps.test")
        status = "" if said.status == 200 else f"{said.status} "
        assert (path, status + said.headers.get("location", said.body.decode())) == (path, answer)


async def test_headers(hosting: Hosting) -> None:
    said = await hosting.ask("/")
    home = said.headers
    assert home["x-frame-options"] == "DENY"
    assert home["x-quoted"] == '"a" {{.}} `b`'
    assert said.names.count("link") == 2
    assert (home["cache-control"], home["content-type"]) == ("no-cache", "text/html; charset=utf-8")
    script = (await hosting.ask("/assets/index-GpEN3EET.js")).headers
    assert (script["cache-control"], "x-frame-options" in script) == ("public, max-age=60", False)
    assert script["x-content-type-options"] == "nosniff"
    assert script["content-type"] == "text/javascript; charset=utf-8"
    data = (await hosting.ask("/data/7.json")).headers
    assert (data["access-control-allow-origin"], data["content-type"]) == ("*", "application/vnd.api+json")
    about = (await hosting.ask("/about")).headers
    assert (about["x-content-type-options"], about["cache-control"]) == ("sniff", "no-cache")
    assert (await hosting.ask("/%61.txt")).headers["x-text"] == "yes"
    assert (await hosting.ask("/about/")).headers["x-content-type-options"] == "sniff"
    assert "x-frame-options" not in (await hosting.ask("/assets")).headers
    assert "x-text" in (await hosting.ask("/a.txt/")).headers
    assert (await hosting.ask("/", f"If-None-Match: {home['etag']}")).status == 304


async def test_methods(hosting: Hosting) -> None:
    head = await hosting.ask("/old", method="HEAD")
    assert (head.status, head.headers["location"]) == (301, "/new")
    page = await hosting.ask("/", method="HEAD")
    assert (page.status, page.headers["x-frame-options"], page.headers["content-length"]) == (200, "DENY", "4")
    assert (await hosting.ask("/old", method="POST")).status == 405


@pytest.mark.parametrize(
    "line",
    [
        "/only",
        "/a/*/b /new",
        "/store id=:id /blog/:id 301",
        "/a /b 418",
        "/a https://else.example/ 200",
        "/a https://user@evil.example/ 301",
        "/a javascript:alert(1) 301",
        "/a/:x/:x /b",
        "/a /a/",
        "/:x/ /:x?y=1 302",
        f"/a /{'b' * 3000}",
    ],
)
def test_a_redirect_that_cannot_be_read_is_named(line: str) -> None:
    problems: list[str] = []
    rules = parse_redirects(["", line, "/good /new"], problems)
    assert [rule.source for rule in rules] == ["/good"]
    assert len(problems) == 1
    assert problems[0].startswith("_redirects:2 is skipped: ")


@pytest.mark.parametrize(
    "line",
    [
        "Content-Length: 3",
        "Capsule-Status: 301",
        "Set-Cookie: a=b; domain=apps.test",
        "No value",
        "X-Umlaut: ü",
        "Content-Security-Policy: script-src ".ljust(HEADER_CHARACTERS + 1, "x"),
    ],
)
def test_a_header_that_cannot_be_set_is_named(line: str) -> None:
    """A long one can, such as a Content-Security-Policy with the digests of many scripts."""
    problems, policy = list[str](), "Content-Security-Policy: script-src ".ljust(HEADER_CHARACTERS, "x")
    rules = parse_headers(["/*", f"  {line}", "  X-Good: 1", f"  {policy}"], problems)
    assert [[name for name, _ in rule.lines] for rule in rules] == [["x-good", "content-security-policy"]]
    assert len(problems) == 1
    assert problems[0].startswith("_headers:2 is skipped: ")


def test_a_warning_names_some_lines() -> None:
    assert explain_problems([]) == ""
    assert explain_problems(["_headers:3 is skipped"]) == "_headers:3 is skipped."
    assert explain_problems([f"{number}{'x' * 200}" for number in range(12)]).count("x" * 99) == 10
    assert explain_problems(["a"] * 12) == "; ".join(["a"] * 10) + "; and 2 more."


def test_what_is_too_much_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / REDIRECTS).write_text("/a /b\n" * (MAX_REDIRECTS + 5))
    (tmp_path / "files" / HEADERS).write_text("/a\n X-A: 1\n" * (MAX_HEADERS + 5))
    problems = compile_rules(tmp_path)
    assert len(problems) == 2
    (tmp_path / "files" / REDIRECTS).write_bytes(b"#" * (MAX_BYTES + 1))
    assert compile_rules(tmp_path) == [f"{REDIRECTS} is skipped: it has more than {MAX_BYTES} bytes"]
    assert not [*(tmp_path / "files").iterdir()]


@pytest.mark.parametrize("path", ["/" + "a" * 300, "/a" * 400, "/" + "%C3%BC" * 150, "/a%00b", "/.." * 90])
def test_a_path_that_no_file_can_have(tmp_path: Path, path: str) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / REDIRECTS).write_text(f"{path} /x 301\n{path} /y 200\n{path}/* /z\n")
    assert compile_rules(tmp_path) == []


def test_lines_below_a_path_that_cannot_be_read_belong_to_no_path() -> None:
    problems: list[str] = []
    assert parse_headers(["  X-Early: 1", "/a", "  X-A: 1", "b", "  X-B: 1"], problems)[0].lines == [("x-a", "1")]
    assert [problem.split(" ")[0] for problem in problems] == ["_headers:1", "_headers:4"]


async def test_many_patterns_for_the_same_paths(hosting: Hosting) -> None:
    apart = "".join(f"/from-{number}/* /to/:splat\n" for number in range(MAX_PATTERNS))
    alike = "".join(f"/from/{number}/* /to/{number}/:splat\n" for number in range(MAX_PATTERNS + 1))
    site = hosting.publish("dep_6", {REDIRECTS: apart + alike}, "alike.apps.test", app_id="alike")
    problems = compile_rules(site.release("dep_6"))
    assert problems == [f"_redirects: of the lines with * or :name that start alike, the first {MAX_PATTERNS} count"]
    for path, status in {f"/from-{MAX_PATTERNS - 1}/x": 301, "/from/0/x": 301, f"/from/{MAX_PATTERNS}/x": 404}.items():
        assert (await hosting.ask(path, host="alike.apps.test")).status == status, path
