"""lib/ai.js with unusual and invalid responses, as proxies and other servers send them."""

import email.utils
import json
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.browser.site import Site
from tests.browser.visitor import Visitor, visiting
from tests.fakes import FakeAppBackend
from tests.fakes.server import CLOSE, HANG, RESET, Exchange, FakeServer, Head, Script, Step
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Headers": "authorization,content-type",
    "Access-Control-Expose-Headers": "Retry-After,X-Request-Id",
}
DONE = b'event: done\ndata: {"model":"m","finishReason":"stop","usage":null}\n\n'


class Wire(FakeServer):
    """A server in place of the gateway."""

    def script(self, exchange: Exchange) -> Script:
        return [Head(204, CORS)] if exchange.method == "OPTIONS" else self.reply

    def streams(self, *steps: Step) -> None:
        self.reply = [Head(200, {"Content-Type": "text/event-stream", **CORS}), *steps]

    def answers(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.reply = [Head(status, {"Content-Type": kind, **CORS, **named}), body]


module_fixture = pytest_asyncio.fixture(scope="module", loop_scope="session")


@module_fixture
async def wire() -> AsyncIterator[Wire]:
    async with Wire() as wire:
        yield wire


@module_fixture
async def visitor(browser: Browser, wire: Wire, backend: FakeAppBackend) -> AsyncIterator[Visitor]:
    async with Site() as site:
        site.env = {"VITE_SERVICE_AI_URL": f"{wire.address}/capsule/any/ai"}
        site.token = backend.token()
        async with visiting(browser, site, "any") as visitor:
            yield visitor


def token(text: str) -> bytes:
    return b"data: " + json.dumps({"token": text}, ensure_ascii=False).encode() + b"\n\n"


def byte_by_byte(data: bytes) -> list[Step]:
    return [step for byte in data for step in (bytes([byte]), 0.001)]


WHOLE = token("Ça ") + token("va 🙂") + DONE


FORMS: dict[str, list[Step]] = {
    "at once": [WHOLE],
    "byte by byte": byte_by_byte(WHOLE),
    "CRLF": [WHOLE.replace(b"\n", b"\r\n")],
    "CRLF byte by byte": byte_by_byte(WHOLE.replace(b"\n", b"\r\n")),
    "CR": [WHOLE.replace(b"\n", b"\r"), HANG],  # which does not delay tokens
    "byte order mark": [b"\xef\xbb\xbf" + WHOLE],
    "comments": [b": hello\n\n:\n", token("Ça "), b": keep-alive\n\n", token("va 🙂"), DONE],
    "several lines": [b'data: {"token":\ndata:"\xc3\x87a "}\nid: 7\nretry: 5\nunknown\n\n', token("va 🙂"), DONE],
    "unknown and empty events": [b"event: later\ndata: anything\n\nevent: done\n\n\n\n", WHOLE],
    "something after done": [WHOLE + token("after the end")],
    "open after done": [WHOLE, HANG],
}


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_a_stream(visitor: Visitor, wire: Wire, form: str) -> None:
    wire.streams(*FORMS[form])
    answer = await visitor.ask("?")
    assert (answer.tokens, answer.text, answer.error) == (["Ça ", "va 🙂"], "Ça va 🙂", None)


@pytest.mark.parametrize(
    "end",
    [[], [CLOSE], [RESET], [DONE[:-1]]],
    ids=["ended early", "closed", "reset", "done without its blank line"],
)
async def test_a_cut_stream_never_resolves(visitor: Visitor, wire: Wire, end: list[Step]) -> None:
    async def wait_for_token(_: Exchange) -> None:
        await wait_until(visitor.tokens)  # the browser drops what it has not read when the connection breaks

    wire.streams(token("Ça "), wait_for_token, *end)
    answer = await visitor.ask("?")
    assert (answer.code, answer.text, answer.tokens) == ("STREAM_CUT", None, ["Ça "])


async def test_the_errors_own_code(visitor: Visitor, wire: Wire) -> None:
    error = {"error": {"code": "PROVIDER_TIMEOUT", "message": "Too slow.", "requestId": "r1"}}
    wire.streams(token("Ça "), b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n")
    answer = await visitor.ask("?")
    assert (answer.code, answer.message) == ("PROVIDER_TIMEOUT", "Too slow.")
    assert (answer.requestId, answer.status) == ("r1", None)


@pytest.mark.parametrize("data", [b"not json", b"{}", b'{"token":7}', b"null", b'event: error\ndata: "?"'])
async def test_invalid_events(visitor: Visitor, wire: Wire, data: bytes) -> None:
    wire.streams(data if data.startswith(b"event") else b"data: " + data, b"\n\n", HANG)
    assert (await visitor.ask("?")).code == "ANSWER_UNEXPECTED"


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
    visitor: Visitor, wire: Wire, status: int, kind: str, body: bytes
) -> None:
    wire.answers(status, body, kind)
    for options in ("{}", "{ whole: true }"):
        answer = await visitor.ask("?", options)
        assert (answer.code, answer.status, answer.known) == ("ANSWER_UNEXPECTED", status, True)


async def test_the_retry_time(visitor: Visitor, wire: Wire) -> None:
    error = b'{"error": {"code": "APP_RATE_LIMITED", "message": "Wait.", "requestId": "r2"}}'
    now = time.time()
    dates = {seconds: email.utils.formatdate(now + seconds, usegmt=True) for seconds in (40, -40)}
    for header, least, most in (("17", 17, 17), ("0", 0, 0), (dates[40], 30, 40), (dates[-40], 0, 0)):
        wire.answers(429, error, Retry_After=header)
        answer = await visitor.ask("?")
        assert (answer.code, answer.status) == ("APP_RATE_LIMITED", 429)
        assert least <= answer.retryAfter <= most, header
    wire.answers(429, error, Retry_After="soon")
    assert (await visitor.ask("?")).retryAfter is None


async def test_a_full_answer_that_is_cut_off(visitor: Visitor, wire: Wire) -> None:
    wire.reply = [Head(200, {"Content-Type": "application/json", **CORS}), b'{"text": "half', CLOSE]
    assert (await visitor.ask("?", "{ whole: true }")).code == "NETWORK_ERROR"


async def test_no_server_at_the_address(visitor: Visitor, wire: Wire) -> None:
    wire.reply = [RESET]
    for options in ("{}", "{ whole: true }"):
        answer = await visitor.ask("?", options)
        assert (answer.code, answer.status) == ("NETWORK_ERROR", None)


async def test_the_request(visitor: Visitor, wire: Wire) -> None:
    wire.streams(DONE)
    await visitor.ask("Ça va 🙂?")
    sent = wire.exchanges[-1]
    assert sent.json == {"prompt": "Ça va 🙂?", "stream": True}
    assert (sent.header("accept"), sent.header("content-type")) == ("text/event-stream", "application/json")
    assert (sent.header("authorization") or "").startswith("Bearer ey")
    assert sent.header("cookie") is None
