"""The provider fails. Before the first token, the response has the failure's status and costs nothing. After it, the
stream ends with an error event and costs the maximum.

test_dialects.py and test_connection_states.py have more of the ways in which an answer breaks.
"""

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, answer, chunk, event, tokens
from tests.fakes.server import CLOSE, Script
from tests.support.accounts import App
from tests.support.prices import cost, max_cost
from tests.support.responses import failed, refused, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

NESTED = {"error": {"message": "kaputt, cormorant", "type": "server_error", "code": 500}}
QUOTA = {"error": {"message": "You exceeded your current quota, check your billing", "code": "insufficient_quota"}}
REFUSED, ERROR, UNREACHABLE, EXHAUSTED = (
    (400, "PROVIDER_REFUSED"),
    (502, "PROVIDER_ERROR"),
    (502, "PROVIDER_UNREACHABLE"),
    (503, "PROVIDER_QUOTA_EXHAUSTED"),
)

BEFORE: dict[str, tuple[Script, tuple[int, str]]] = {
    **{f"status {s}": (answer(s, NESTED), REFUSED) for s in (422,)},
    **{f"status {s}": (answer(s, NESTED), ERROR) for s in (403, 404)},
    "error page": (answer(500, b"<html>oops</html>", {"Content-Type": "text/html"}), ERROR),
    "redirect": (answer(302, b"", {"Location": "http://127.0.0.1:1/"}), ERROR),
    "quota": (answer(429, QUOTA), EXHAUSTED),
    "rate": (answer(429, {"error": {"message": "Rate limit reached"}}), EXHAUSTED),
    "a page instead of a stream": (answer(200, b"<html>hello</html>", {"Content-Type": "text/html"}), ERROR),
    "closed before an answer": ([CLOSE], UNREACHABLE),
    "cut after a usage": ([ROLE, chunk(usage=(5, 5)), CLOSE], ERROR),
    "nested error inside the stream": ([ROLE, event(NESTED), DONE], ERROR),
    "refusal inside the stream": ([ROLE, event({"error": {"message": "cormorant", "code": 400}}), DONE], REFUSED),
}


@pytest.mark.parametrize(
    ("case", "stream"), [*((case, True) for case in BEFORE), ("rate", False), ("nested error inside the stream", False)]
)
async def test_before_a_token(app: App, provider: FakeProvider, case: str, stream: bool) -> None:
    script, (status, code) = BEFORE[case]
    prompt = provider.plays(script)
    response = await app.ask(prompt, stream=stream)
    error = refused(response, status, code)
    assert "cormorant" not in error["message"]
    assert ("Retry-After" in response.headers) == (code == "PROVIDER_UNREACHABLE" or case == "rate")
    if case == "rate":
        assert int(response.headers["Retry-After"]) >= 1
    assert len(provider.asked(prompt)) == 1, "no retry once a byte may have reached the provider"
    assert await app.account.settled() == 0


AFTER: dict[str, Script] = {
    "cut": [CLOSE],
    "nested error": [event(NESTED), DONE],
    "ended without a finish": [],
}


@pytest.mark.parametrize("case", AFTER)
async def test_after_a_token(app: App, provider: FakeProvider, case: str) -> None:
    prompt = provider.plays(ROLE, chunk("Gu"), chunk("ten"), *AFTER[case])
    events = await app.events(prompt)
    assert text_of(events) == "Guten"
    assert failed(events) == "PROVIDER_ERROR"
    assert "cormorant" not in events[-1].data
    assert await app.account.settled() == max_cost(prompt)
    # A whole answer that cannot be completed has the status of its failure, and no part of the text.
    response = await app.ask(prompt)
    assert response.status_code == 502
    assert "Guten" not in response.text
    assert await app.account.settled() == 2 * max_cost(prompt)
    assert len(provider.asked(prompt)) == 2


async def test_usage_before_a_cut_is_charged(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(chunk("a", usage=(5, 1)), chunk("b", usage=(5, 2)), CLOSE)
    assert failed(await app.events(prompt)) == "PROVIDER_ERROR"
    assert await app.account.settled() == cost(5, 2)


async def test_huge_usage_is_settled_and_logged(app: App, provider: FakeProvider) -> None:
    """This holds even for a usage of 10^400, which no float can represent."""
    prompt = provider.plays(tokens("a", usage=(10**400, 1)))
    for stream in (False, True):
        before = await app.account.settled()
        response = await app.ask(prompt, stream=stream)
        assert response.status_code == 200
        assert await app.account.settled() - before == max_cost(prompt)
        logged = await app.gateway.request_line(response.headers["X-Request-Id"])
        assert (logged["event"], logged["code"], logged["nano_euro"]) == ("request", "", max_cost(prompt))
        assert logged["input_tokens"] == 10**9


async def test_a_refused_request_is_logged_with_the_providers_status(app: App, provider: FakeProvider) -> None:
    """A context overflow is a 400, which SDKs do not retry, and the log distinguishes it from an outage."""
    overflow = answer(400, {"error": {"code": "context_length_exceeded", "message": "m"}})
    for script, status, code in ((overflow, 400, "PROVIDER_REFUSED"), (answer(503), 502, "PROVIDER_ERROR")):
        error = refused(await app.ask(provider.plays(script)), status, code)
        logged = await app.gateway.request_line(error["requestId"])
        assert (logged["code"], logged["status"], logged["nano_euro"]) == (code, status, 0)
        assert logged["provider_status"] == (400 if script is overflow else 503)
    metrics = (await app.gateway.http.get("/metrics")).text
    assert 'gateway_provider_errors_total{code="PROVIDER_REFUSED"' not in metrics, "the provider works"
