"""lib/ai.js as an app uses it: results, errors, cancellation at the provider, odd responses, and as a package."""

import asyncio
import email.utils
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.browser.conftest import Visit
from tests.browser.packages import HERE, require
from tests.browser.visitor import MODULE, Folder, Site, Visitor, visiting
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, tokens
from tests.fakes.server import CLOSE, HANG, RESET, Exchange, FakeServer, Head, Script, Step
from tests.support import programs
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import DOMAIN, App
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_stream_delivers_each_token_when_it_arrives(visitor: Visitor, provider: FakeProvider) -> None:
    go_on = asyncio.Event()
    prompt = provider.plays(ROLE, chunk("Bon"), go_on, chunk("jour"), chunk(finish="stop", usage=(1, 2)), DONE)
    asking = asyncio.create_task(visitor.ask(prompt))
    await wait_until(lambda: _has(visitor, ["Bon"]))
    go_on.set()
    answer = await asking
    assert (answer.text, answer.tokens) == ("Bonjour", ["Bon", "jour"])


async def test_on_done_gets_how_an_answer_ended(visitor: Visitor, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk("Bon"), chunk(finish="length"), chunk(usage=(5, 1)), DONE)
    await visitor.page.evaluate("window.ends = []")
    answer = await visitor.ask(prompt, "{ onDone: (end) => void ends.push([end, tokens.length]) }")
    assert answer.text == "Bon"
    [[end, tokens_before]] = await visitor.page.evaluate("window.ends")
    usage = {"inputTokens": 5, "outputTokens": 1}
    assert (end, tokens_before) == ({"model": end["model"], "finishReason": "length", "usage": usage}, 1)
    answer = await visitor.ask(prompt, "{ onDone: () => { throw new RangeError('mine') } }")
    assert answer.name == "RangeError"


@pytest.mark.parametrize("whole", ["true", "false"])
async def test_the_effort_of_thinking(visitor: Visitor, provider: FakeProvider, whole: str) -> None:
    prompt = provider.plays(tokens("x"))
    assert (await visitor.ask(prompt, f"{{ whole: {whole}, effort: 'low' }}")).text == "x"
    assert (await visitor.ask(prompt, f"{{ whole: {whole} }}")).text == "x"
    assert [exchange.json.get("reasoning_effort") for exchange in provider.asked(prompt)] == ["low", None]
    assert (await visitor.ask(prompt, f"{{ whole: {whole}, effort: 'none' }}")).code == "REQUEST_MALFORMED"


@pytest.mark.parametrize("whole", ["true", "false"])
async def test_an_answer_that_thinking_left_empty_is_an_error(
    visitor: Visitor, provider: FakeProvider, whole: str
) -> None:
    prompt = provider.plays(ROLE, chunk(reasoning_content="hm"), chunk(finish="length"), chunk(usage=(5, 200)), DONE)
    await visitor.page.evaluate("window.ends = []")
    answer = await visitor.ask(prompt, f"{{ whole: {whole}, onDone: (end) => void ends.push(end.finishReason) }}")
    assert (answer.text, answer.code, answer.known, answer.status) == (None, "ANSWER_EMPTY", True, None)
    assert answer.requestId
    assert "thinking" in answer.message
    assert await visitor.page.evaluate("ends") == ([] if whole == "true" else ["length"])
    complete = provider.plays(ROLE, chunk(finish="stop"), chunk(usage=(5, 1)), DONE)
    answer = await visitor.ask(complete, f"{{ whole: {whole} }}")
    assert (answer.text, answer.error) == ("", None), "an empty answer that is complete is none"


async def _has(visitor: Visitor, tokens: list[str]) -> bool:
    return await visitor.tokens() == tokens


@pytest.mark.parametrize("script", [[ROLE, chunk("One"), HANG], [HANG]], ids=["in an answer", "before the first token"])
async def test_an_abort_cancels_the_request_at_the_provider(
    visitor: Visitor, provider: FakeProvider, script: Script
) -> None:
    prompt = provider.plays(*script)
    asking = asyncio.create_task(visitor.ask(prompt, "{ stop: (window.stop_ = new AbortController()) }"))
    await wait_until(lambda: _has(visitor, ["One"]) if len(script) > 1 else provider.asked(prompt))
    await visitor.page.evaluate("stop_.abort()")
    answer = await asking
    assert (answer.text, answer.name, answer.known) == (None, "AbortError", False)
    await asyncio.wait_for(provider.asked(prompt)[0].canceled.wait(), 2)


async def test_an_abort_before_the_start_sends_no_request(visitor: Visitor, provider: FakeProvider, site: Site) -> None:
    prompt = provider.plays(tokens("no"))
    answer = await visitor.ask(prompt, "{ stop: { signal: AbortSignal.abort() } }")
    assert answer.name == "AbortError"
    assert not provider.asked(prompt)
    assert not [e for e in site.exchanges if e.path == "/session"]


async def test_an_abort_inside_on_token_ends_the_stream(visitor: Visitor, provider: FakeProvider) -> None:
    burst = b"".join([ROLE, chunk("One"), chunk("two"), chunk("three")])
    prompt = provider.plays(burst, HANG)
    await visitor.page.evaluate("window.stop_ = new AbortController()")
    answer = await visitor.ask(prompt, "{ stop: stop_, onToken: (t) => (tokens.push(t), stop_.abort()) }")
    assert answer.name == "AbortError"
    assert answer.tokens == ["One"]


async def test_an_abort_does_not_wait_for_a_slow_on_token(visitor: Visitor, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk("One"), HANG)
    await visitor.page.evaluate("window.stop_ = new AbortController()")
    never = "{ stop: stop_, onToken: () => new Promise(() => void (window.called = true)) }"
    asking = asyncio.create_task(visitor.ask(prompt, never))
    await visitor.page.wait_for_function("window.called")
    await visitor.page.evaluate("stop_.abort(new DOMException('late', 'TimeoutError'))")
    answer = await asyncio.wait_for(asking, 5)
    assert answer.name == "TimeoutError"
    await asyncio.wait_for(provider.asked(prompt)[0].canceled.wait(), 2)


async def test_an_error_in_on_token_ends_the_request(visitor: Visitor, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk("One"), HANG)
    answer = await visitor.ask(prompt, "{ onToken: () => { throw new RangeError('mine') } }")
    assert (answer.name, answer.message) == ("RangeError", "mine")
    await asyncio.wait_for(provider.asked(prompt)[0].canceled.wait(), 2)


async def test_a_slow_on_token_gets_all_tokens_in_order(visitor: Visitor, provider: FakeProvider) -> None:
    words = [f"{n} " for n in range(20)]
    slow = "async (t) => { await new Promise((r) => setTimeout(r, 12 * Math.random())); tokens.push(t) }"
    answer = await visitor.ask(provider.plays(tokens(*words)), f"{{ onToken: {slow} }}")
    assert answer.tokens == words


async def test_a_refused_token(app: App, visit: Visit, site: Site, provider: FakeProvider) -> None:
    site.token = app.token(expires=-60)
    async with visit(app) as visitor:
        for options in ("{}", "{ whole: true }"):
            answer = await visitor.ask("?", options)
            assert (answer.code, answer.status) == ("TOKEN_INVALID", 401)
            assert answer.known
            assert answer.requestId


async def test_no_session_is_an_error_without_a_request(app: App, visit: Visit, site: Site) -> None:
    async with visit(app) as visitor:
        site.token = None
        assert (await visitor.ask("?")).code == "TOKEN_UNAVAILABLE"
    async with visit(app) as visitor:
        auth = "export function getToken() { throw new Error('not signed in'); }"  # not async
        await visitor.page.route("**/auth.js", lambda route: route.fulfill(body=auth, content_type="text/javascript"))
        assert (await visitor.ask("?")).code == "TOKEN_UNAVAILABLE"


async def test_one_session_serves_many_questions(visitor: Visitor, site: Site) -> None:
    await visitor.page.evaluate("Promise.all([ask('a'), ask('b'), ask('c')])")
    assert len([e for e in site.exchanges if e.path == "/session"]) == 1


async def test_a_rate_limit_has_a_retry_time(visitor: Visitor, app: App) -> None:
    for _ in range(20):
        assert (await app.ask("quick")).status_code == 200
    answer = await visitor.ask("?")
    assert (answer.code, answer.status) == ("USER_RATE_LIMITED", 429)
    assert 50 <= answer.retryAfter <= 60


@pytest.mark.parametrize("env", [None, {"VITE_OTHER": "1"}], ids=["served as it is", "absent from the build"])
async def test_a_missing_address(app: App, visit: Visit, site: Site, env: dict[str, str] | None) -> None:
    site.env = env
    async with visit(app) as visitor:
        for options in ("{}", "{ whole: true }"):
            answer = await visitor.ask("?", options)
            assert (answer.code, answer.status) == ("INFERENCE_DISABLED", None)
            assert answer.known


async def test_an_origin_that_is_not_the_apps(app: App, visit: Visit, provider: FakeProvider) -> None:
    async with visit(app, at="another") as visitor:
        prompt = provider.plays(tokens("no"))
        assert (await visitor.ask(prompt)).code == "NETWORK_ERROR"
    assert not provider.asked(prompt)


CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Headers": "authorization,content-type",
    "Access-Control-Expose-Headers": "Retry-After,X-Request-Id",
}
END = b'event: done\ndata: {"model":"m","finishReason":"stop","usage":null}\n\n'


class Wire(FakeServer):
    """A server in place of the gateway."""

    def script(self, exchange: Exchange) -> Script:
        return [Head(204, CORS)] if exchange.method == "OPTIONS" else self.reply

    def streams(self, *steps: Step) -> None:
        self.reply = [Head(200, {"Content-Type": "text/event-stream", **CORS}), *steps]

    def answers(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.reply = [Head(status, {"Content-Type": kind, **CORS, **named}), body]


@module_fixture
async def wire() -> AsyncIterator[Wire]:
    async with Wire() as wire:
        yield wire


@module_fixture
async def wired(browser: Browser, wire: Wire, backend: FakeAppBackend) -> AsyncIterator[Visitor]:
    async with Site() as site:
        site.env = {"VITE_SERVICE_AI_URL": f"{wire.address}/capsule/any/ai"}
        site.token = backend.token()
        async with visiting(browser, site, "any") as wired:
            yield wired


def token(text: str) -> bytes:
    return b"data: " + json.dumps({"token": text}, ensure_ascii=False).encode() + b"\n\n"


def byte_by_byte(data: bytes) -> list[Step]:
    return [step for byte in data for step in (bytes([byte]), 0.001)]


WHOLE = token("Ça ") + token("va 🙂") + END


FORMS: dict[str, list[Step]] = {
    "byte by byte": byte_by_byte(WHOLE),
    "CRLF byte by byte": byte_by_byte(WHOLE.replace(b"\n", b"\r\n")),
    "CR": [WHOLE.replace(b"\n", b"\r"), HANG],  # which does not delay tokens
    "byte order mark": [b"\xef\xbb\xbf" + WHOLE],
    "comments": [b": hello\n\n:\n", token("Ça "), b": keep-alive\n\n", token("va 🙂"), END],
    "several lines": [b'data: {"token":\ndata:"\xc3\x87a "}\nid: 7\nretry: 5\nunknown\n\n', token("va 🙂"), END],
    "unknown and empty events": [b"event: later\ndata: anything\n\nevent: done\n\n\n\n", WHOLE],
    "something after done": [WHOLE + token("after the end")],
}


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_a_stream(wired: Visitor, wire: Wire, form: str) -> None:
    wire.streams(*FORMS[form])
    answer = await wired.ask("?")
    assert (answer.tokens, answer.text, answer.error) == (["Ça ", "va 🙂"], "Ça va 🙂", None)


@pytest.mark.parametrize(
    "end",
    [[], [RESET], [END[:-1]]],
    ids=["ended early", "reset", "done without its blank line"],
)
async def test_a_cut_stream_never_resolves(wired: Visitor, wire: Wire, end: list[Step]) -> None:
    async def wait_for_token(_: Exchange) -> None:
        await wait_until(wired.tokens)  # the browser drops what it has not read when the connection breaks

    wire.streams(token("Ça "), wait_for_token, *end)
    answer = await wired.ask("?")
    assert (answer.code, answer.text, answer.tokens) == ("STREAM_CUT", None, ["Ça "])


async def test_the_errors_own_code(wired: Visitor, wire: Wire) -> None:
    error = {"error": {"code": "PROVIDER_TIMEOUT", "message": "Too slow.", "requestId": "r1"}}
    wire.streams(token("Ça "), b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n")
    answer = await wired.ask("?")
    assert (answer.code, answer.message) == ("PROVIDER_TIMEOUT", "Too slow.")
    assert (answer.requestId, answer.status) == ("r1", None)


@pytest.mark.parametrize("data", [b"not json", b"{}", b'{"token":7}', b"null", b'event: error\ndata: "?"'])
async def test_invalid_events(wired: Visitor, wire: Wire, data: bytes) -> None:
    wire.streams(data if data.startswith(b"event") else b"data: " + data, b"\n\n", HANG)
    assert (await wired.ask("?")).code == "ANSWER_UNEXPECTED"


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (502, "text/html", b"<h1>Bad Gateway</h1>"),
        (500, "application/json", b""),
        (503, "application/json", b'{"error": "down"}'),
        (200, "text/html", b"<h1>Please sign in to the hotel's network</h1>"),
        (200, "application/json", b"[]"),
    ],
)
async def test_error_responses_without_the_services_body(
    wired: Visitor, wire: Wire, status: int, kind: str, body: bytes
) -> None:
    wire.answers(status, body, kind)
    for options in ("{}", "{ whole: true }"):
        answer = await wired.ask("?", options)
        assert (answer.code, answer.status, answer.known) == ("ANSWER_UNEXPECTED", status, True)


async def test_the_retry_time(wired: Visitor, wire: Wire) -> None:
    error = b'{"error": {"code": "APP_RATE_LIMITED", "message": "Wait.", "requestId": "r2"}}'
    now = time.time()
    dates = {seconds: email.utils.formatdate(now + seconds, usegmt=True) for seconds in (40, -40)}
    for header, least, most in (("17", 17, 17), ("0", 0, 0), (dates[40], 30, 40), (dates[-40], 0, 0)):
        wire.answers(429, error, Retry_After=header)
        answer = await wired.ask("?")
        assert (answer.code, answer.status) == ("APP_RATE_LIMITED", 429)
        assert least <= answer.retryAfter <= most, header
    wire.answers(429, error, Retry_After="soon")
    assert (await wired.ask("?")).retryAfter is None


async def test_a_full_answer_that_is_cut_off(wired: Visitor, wire: Wire) -> None:
    wire.reply = [Head(200, {"Content-Type": "application/json", **CORS}), b'{"text": "half', CLOSE]
    assert (await wired.ask("?", "{ whole: true }")).code == "NETWORK_ERROR"


async def test_no_server_at_the_address(wired: Visitor, wire: Wire) -> None:
    wire.reply = [RESET]
    for options in ("{}", "{ whole: true }"):
        answer = await wired.ask("?", options)
        assert (answer.code, answer.status) == ("NETWORK_ERROR", None)


async def test_the_request(wired: Visitor, wire: Wire) -> None:
    wire.streams(END)
    await wired.ask("Ça va 🙂?")
    sent = wire.exchanges[-1]
    assert sent.json == {"prompt": "Ça va 🙂?", "stream": True}
    assert (sent.header("accept"), sent.header("content-type")) == ("text/event-stream", "application/json")
    assert (sent.header("authorization") or "").startswith("Bearer ey")
    assert sent.header("cookie") is None


NAME = json.loads((MODULE / "package.json").read_text())["name"]
PAGE = '<!doctype html><title>An app</title><output></output><script type="module" src="./main.ts"></script>'
MAIN = f"""
import {{ AiError, complete, streamComplete, type AnswerEnd }} from "{NAME}";
import {{ setTokenSource }} from "{NAME}/auth";

setTokenSource(async () => "TOKEN");
const ended: AnswerEnd[] = [];
const answer: string = await complete("PROMPT").catch((error: AiError) => error.code);
const streamed: string = await streamComplete("PROMPT", () => {{}}, {{ onDone: (end) => void ended.push(end) }});
document.querySelector("output")!.textContent = `${{answer}} ${{streamed}} ${{ended.length}}`;
"""


def install(folder: Path) -> list[str]:
    """Installs the package in an app's folder as npm would, and returns the names of its files."""
    environment = {**os.environ, "npm_config_cache": str(folder / ".npm")}
    command = [programs.require("npm"), "pack", "--silent", "--pack-destination", folder]
    subprocess.run(command, cwd=MODULE, env=environment, check=True, capture_output=True, timeout=60)
    [packed] = folder.glob("*.tgz")
    (folder / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", packed, "-C", folder / "unpacked"], check=True, timeout=60)
    installed = folder / "node_modules" / NAME
    installed.parent.mkdir()
    (folder / "unpacked" / "package").rename(installed)
    return sorted(str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file())


def run_tool(tool: Path, *arguments: str, cwd: Path, **settings: str) -> None:
    environment = {**os.environ, **settings}
    done = subprocess.run([tool, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_the_package_answers_in_a_vite_app(
    browser: Browser, app: App, provider: FakeProvider, tmp_path: Path
) -> None:
    vite, tsc = require(".bin/vite"), require(".bin/tsc")
    files = install(tmp_path)
    assert files == ["README.md", "lib/ai.d.ts", "lib/ai.js", "lib/auth.d.ts", "lib/auth.js", "package.json"]

    prompt = provider.plays(tokens("Bon", "jour"))
    (tmp_path / "index.html").write_text(PAGE)
    (tmp_path / "main.ts").write_text(MAIN.replace("PROMPT", prompt).replace("TOKEN", app.token()))
    strict = ["--strict", "--noEmit", "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"]
    run_tool(tsc, *strict, "main.ts", cwd=tmp_path)
    address = app.gateway.address + app.path
    run_tool(vite, "build", "--target", "es2022", cwd=tmp_path, VITE_SERVICE_AI_URL=address)

    async with Folder(tmp_path / "dist") as site:
        page = await browser.new_page()
        await page.goto(f"http://{app.name}.{DOMAIN}:{site.port}/")
        await expect(page.locator("output")).to_have_text("Bonjour Bonjour 1")
        await page.close()


async def test_the_types_hold() -> None:
    """Of ai.d.ts, and an app in TypeScript can use it: tsc checks both in its strictest mode."""
    checked = subprocess.run([require(".bin/tsc"), "--project", HERE], capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout
