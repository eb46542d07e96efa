"""An account's usage and request log, after requests with every kind of end."""

import asyncio
import csv
import io
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.ids import now_iso
from gateway.inference.provider.sse import MAX_REPORTED_TOKENS
from gateway.keys import usage_key
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.server import CLOSE, HANG, answer
from tests.gateway.conftest import COUNTED_SOON
from tests.support.accounts import Account, App
from tests.support.fixtures import module_fixture
from tests.support.full_hours import HOUR_SECONDS, wait_past_end_of
from tests.support.gateway_process import OPERATOR, Gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.prices import cost, max_cost
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


QWEN = "qwen3.6-35b-a3b"
COUNTS = ("requests", "refused", "failed", "interrupted", "inputTokens", "outputTokens")
COUNTS += ("nanoEuro", "interruptedNanoEuro")
FIELDS = {"id", "at", "app", "model", "status", "code", "inputTokens", "outputTokens", "nanoEuro"}
FIELDS |= {"ttftMs", "durationMs", "reason"}


@module_fixture
async def single(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway that may send one request at a time, with a daily cap of 0.0012 EUR for the free plan."""
    settings = {"GATEWAY_PROVIDER_CONCURRENCY": "1", "GATEWAY_DAILY_CAPS": "free=0.0012,starter=0.5,maker=2,max=10"}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("single"), COUNTED_SOON, **settings) as running:
        yield running


async def requests_of(account: Account, number: int) -> list[dict[str, Any]]:
    """Waits until `number` requests are logged."""

    async def logged() -> Any:
        return (await account.get("/account/requests")).json()

    rows: list[dict[str, Any]] = await wait_until(logged, 15, holds=lambda rows: len(rows) >= number)
    assert len(rows) == number
    return rows


async def usage_of(account: Account, **query: str) -> list[dict[str, Any]]:
    response = await account.get("/account/usage?" + "&".join(f"{name}={value}" for name, value in query.items()))
    assert response.status_code == 200, response.text
    rows = response.json()["rows"]
    for row in rows:
        assert row.keys() == {"start", *COUNTS} | ({query["group"]} - {"none"} if "group" in query else set())
    return rows


def total(rows: list[dict[str, Any]], **only: str) -> dict[str, int]:
    chosen = [row for row in rows if only.items() <= row.items()]
    return {name: sum(row[name] for row in chosen) for name in COUNTS if any(row[name] for row in chosen)}


async def test_every_kind_of_end(single: Gateway, backend: FakeAppBackend, provider: FakeProvider) -> None:
    """Each request is logged, whether it is answered, interrupted, failed or refused, and the sums match the spend."""
    app = await single.app(backend, plan="free")
    short: dict[str, Any] = {"maxTokens": 50}
    whole = await app.ask(provider.plays(tokens("a", usage=(70, 30))), **short)
    streamed = provider.plays(tokens("b", model=QWEN))
    cut, stopped = provider.plays(ROLE, chunk("a"), CLOSE), provider.plays(ROLE, chunk("a"), HANG)
    async with app.stream(streamed, model=QWEN, **short) as source:
        assert [event async for event in source.aiter_sse()]
        in_full = source.response.headers["X-Request-Id"]
    broken = await app.ask(cut, **short)
    async with app.stream(stopped, model=QWEN, **short) as source:
        await anext(source.aiter_sse())
        gone = source.response.headers["X-Request-Id"]
    failed = await app.ask(provider.plays(answer(500, {"error": {"message": "x"}})), **short)
    stranger = await app.ask("x", token="no.token.at.all")
    faulty = await app.ask("x", maxTokens=0)
    dear = await app.ask("x")
    refused(broken, 502, "PROVIDER_ERROR")
    refused(stranger, 401, "TOKEN_INVALID")
    refused(dear, 402, "SPEND_CAP_REACHED")
    settled = await app.account.settled()
    lost = max_cost(cut, 50) + max_cost(stopped, 50, QWEN)
    assert settled == cost(70, 30) + cost(7, 3, QWEN) + lost

    rows = {row["id"]: row for row in await requests_of(app.account, 8)}
    assert all(row.keys() == FIELDS for row in rows.values())
    seen = {id: (row["model"], row["status"], row["code"], row["nanoEuro"]) for id, row in rows.items()}
    gpt = "gpt-oss-120b"
    assert seen == {
        whole.headers["X-Request-Id"]: (gpt, 200, "", cost(70, 30)),
        in_full: (QWEN, 200, "", cost(7, 3, QWEN)),
        broken.headers["X-Request-Id"]: (gpt, 502, "PROVIDER_ERROR", max_cost(cut, 50)),
        gone: (QWEN, 200, "CLIENT_GONE", max_cost(stopped, 50, QWEN)),
        failed.headers["X-Request-Id"]: (gpt, 502, "PROVIDER_ERROR", 0),
        stranger.headers["X-Request-Id"]: ("", 401, "TOKEN_INVALID", 0),
        faulty.headers["X-Request-Id"]: ("", 400, "REQUEST_MALFORMED", 0),
        dear.headers["X-Request-Id"]: (gpt, 402, "SPEND_CAP_REACHED", 0),
    }
    first = rows[whole.headers["X-Request-Id"]]
    assert (first["app"], first["inputTokens"], first["outputTokens"]) == (app.name, 70, 30)
    assert {id for id, row in rows.items() if row["ttftMs"] is not None} == {in_full, gone}
    assert all(0 <= row["durationMs"] < 30_000 for row in rows.values())
    arrivals = [row["at"] for row in rows.values()]
    assert arrivals == sorted(arrivals, reverse=True)
    assert now_iso(time.time() - 60) < arrivals[0] <= now_iso()

    by_model = await usage_of(app.account, group="model")
    assert total(by_model) == dict(zip(COUNTS, (8, 4, 1, 2, 77, 33, settled, lost), strict=True))
    assert total(by_model, model=QWEN)["nanoEuro"] == cost(7, 3, QWEN) + max_cost(stopped, 50, QWEN)
    assert total(by_model, model="") == {"requests": 2, "refused": 2}
    hours = (await app.account.get("/account/usage")).json()
    assert {name: sum(hour[name] for hour in hours[-2:]) for name in hours[-1].keys() - {"hour"}} == {
        name: total(by_model)[name] for name in ("requests", "refused", "inputTokens", "outputTokens")
    }
    assert (await (await app.gateway.account()).get("/account/requests")).json() == [], "those of another account"
    for query in ({"by": "day"}, {"by": "hour", "app": ""}, {"by": "day", "group": "app"}):
        assert total(await usage_of(app.account, **query)) == total(by_model)
    assert {row["app"] for row in await usage_of(app.account, by="day", group="app")} == {app.name}

    async def ids(query: str) -> list[str]:
        return [row["id"] for row in (await app.account.get(f"/account/requests?{query}")).json()]

    assert await ids("limit=2") == list(rows)[:2]
    assert set(await ids("outcome=interrupted")) == {broken.headers["X-Request-Id"], gone}
    assert await ids(f"outcome=interrupted&model={QWEN}&app={app.name}") == [gone]
    assert await ids("code=SPEND_CAP_REACHED") == [dear.headers["X-Request-Id"]]
    assert await ids(f"before={list(rows)[2]}&limit=3") == list(rows)[3:6]
    assert await ids(f"before={gone}&outcome=answered") == [in_full, whole.headers["X-Request-Id"]]
    assert await ids(f"from={arrivals[3]}") == [id for id, row in rows.items() if row["at"] >= arrivals[3]]
    assert await ids(f"to={arrivals[3]}") == [id for id, row in rows.items() if row["at"] < arrivals[3]]

    async def detail(id: str) -> dict[str, Any]:
        shown = (await app.account.get(f"/account/requests/{id}")).json()
        own = {name: shown.pop(name) for name in ("reservedNanoEuro", "waitedMs", "limits")}
        tried = [("default", shown["code"])] if shown["provider"] else []
        assert [(each["provider"], each["code"]) for each in shown.pop("attempts")] == tried
        assert (shown.pop("provider"), shown.pop("region")) in ((None, None), ("default", "fr-par"))
        assert shown == rows[id]
        return own | {"limits": {limit["name"]: (limit["limit"], limit["used"]) for limit in own["limits"]}}

    cap = (await app.account.spend())["cap"]
    answered = await detail(whole.headers["X-Request-Id"])
    assert answered["limits"].keys() == {"cap", "requestsPerMinute", "userRequestsPerMinute"}
    assert answered["limits"]["cap"] == (cap, answered["reservedNanoEuro"])
    assert answered["limits"]["userRequestsPerMinute"] == (20, 1)
    assert (await detail(broken.headers["X-Request-Id"]))["reservedNanoEuro"] == max_cost(cut, 50)
    over = await detail(dear.headers["X-Request-Id"])
    assert (over["reservedNanoEuro"], over["limits"]["cap"]) == (0, (cap, settled))
    assert over["limits"]["requestsPerMinute"] == (30, 6)
    assert await detail(stranger.headers["X-Request-Id"]) == {"reservedNanoEuro": 0, "waitedMs": 0, "limits": {}}


async def test_the_limits_in_force(app: App, provider: FakeProvider) -> None:
    """A provider may report any number of tokens, and Redis refuses integers beyond 64 bits."""
    prompt = provider.plays(tokens("a", usage=(10**30, 5)))
    for _ in range(6):
        await app.ask(prompt, maxTokens=50)
    rows = await requests_of(app.account, 6)
    assert {(row["inputTokens"], row["outputTokens"]) for row in rows} == {(MAX_REPORTED_TOKENS, 5)}
    assert total(await usage_of(app.account, group="model"))["inputTokens"] == 6 * MAX_REPORTED_TOKENS
    limits = {"dailyEuro": "0.5", "userDailyEuro": "0.2", "userRequestsPerMinute": 6}
    await app.account.call("PUT", f"/account/apps/{app.name}/limits", limits)
    last = await wait_until(lambda: app.ask("x"), 5, holds=lambda answer: answer.status_code == 429)
    refused(last, 429, "USER_RATE_LIMITED")
    shown = await app.logged(last.headers["X-Request-Id"])
    in_force = {limit["name"]: (limit["limit"], limit["used"]) for limit in shown["limits"]}
    assert [in_force[name][0] for name in ("dailyEuro", "userDailyEuro")] == [500_000_000, 200_000_000]
    assert in_force["dailyEuro"][1] >= 6 * max_cost(prompt, 50)
    assert in_force["userRequestsPerMinute"][1] >= in_force["userRequestsPerMinute"][0] == 6
    assert in_force["requestsPerMinute"][1] == in_force["userRequestsPerMinute"][1]
    assert (shown["reservedNanoEuro"], shown["waitedMs"], shown["reason"]) == (0, 0, None)


async def test_the_wait_for_a_permit(single: Gateway, backend: FakeAppBackend) -> None:
    app = await single.app(backend)
    prompt = single.provider.plays(1.5, tokens("a"))
    first = asyncio.create_task(app.ask(prompt))
    await wait_until(lambda: single.provider.asked(prompt))
    second = await app.logged((await app.ask("x")).headers["X-Request-Id"])
    assert 1000 <= second["waitedMs"] <= second["durationMs"]
    assert (await app.logged((await first).headers["X-Request-Id"]))["waitedMs"] < 1000


async def test_preflights_model_lists_and_unknown_apps_are_not_logged(app: App) -> None:
    headers = {"Origin": app.origin, "Access-Control-Request-Method": "POST"}
    assert (await app.gateway.http.options(app.path, headers=headers)).status_code == 204
    assert (await app.gateway.http.get(f"{app.path}/models", headers=app.headers())).status_code == 200
    assert (await app.gateway.http.post("/capsule/nobody-s-app/ai")).status_code == 404
    assert (await app.post(None, headers={"Origin": "https://evil.example"})).status_code == 403
    (row,) = await requests_of(app.account, 1)
    assert (row["status"], row["code"], row["model"]) == (403, "ORIGIN_NOT_ALLOWED", "")


# -- ranges --------------------------------------------------------------------------------------------------


@pytest.fixture
def hours(gw: Gateway, app: App) -> int:
    """Counts a request in each of the last 50 hours and their days. Returns the start of the current hour."""
    wait_past_end_of(HOUR_SECONDS)
    present = int(time.time()) // 3600 * 3600
    with gw.redis.client() as client:
        for ago in range(50):
            moment = time.gmtime(present - 3600 * ago)
            for name in ("%Y-%m-%dT%H", "%Y-%m-%d"):
                key = usage_key(app.account.id, time.strftime(name, moment))
                client.hincrby(key, "notes/gpt/requests", 1)
                client.expire(key, 600)
    return present


async def test_ranges(app: App, hours: int) -> None:
    def at(ago: int) -> str:
        return now_iso(hours - 3600 * ago)

    async def starts(**query: str) -> list[str]:
        return [row["start"] for row in await usage_of(app.account, **query)]

    assert await starts(by="hour") == [at(ago) for ago in reversed(range(24))]
    assert [row["hour"] for row in (await app.account.get("/account/usage")).json()] == await starts(by="hour")
    assert await starts(**{"from": at(5), "to": at(3)}) == [at(5), at(4)]
    later = {"from": now_iso(hours - 5 * 3600 + 1), "to": now_iso(hours - 3 * 3600 + 1)}
    assert await starts(**later) == [at(4), at(3)]
    assert await starts(**{"from": at(100), "to": at(48)}) == [at(49)]
    days = await usage_of(app.account, by="day")
    today = time.strftime("%Y-%m-%d", time.gmtime(hours))
    assert days[-1]["start"] == f"{today}T00:00:00.000Z"
    assert sum(row["requests"] for row in days) == 50
    assert await starts(by="day", **{"from": today}) == [days[-1]["start"]]
    assert await starts(by="day", to=today) == [row["start"] for row in days[:-1]]
    headers = {"Authorization": f"Bearer {app.account.key}", "Accept": "text/csv"}
    response = await app.gateway.http.get("/account/usage?by=hour&group=app", headers=headers)
    assert response.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert response.headers["Content-Disposition"] == 'attachment; filename="usage-by-hour.csv"'
    heading, *rows = csv.reader(io.StringIO(response.text))
    assert heading == ["start", "app", *COUNTS]
    assert len(rows) == 24
    assert rows[-1] == [now_iso(hours), "notes", "1", *["0"] * 7]


RANGES = ("from=yesterday", "to=", "from=2026-07-02&to=2026-07-02", "from=noon")
LIMITS, CODES = ("limit=0", "limit=1001", "limit=x"), ("code=", "code=token", "code=A%0A")


async def test_invalid_ranges_and_filters_are_refused(app: App) -> None:
    usage = (f"usage?{query}" for query in (*RANGES, "by=minute", "group=user"))
    for query in (*usage, *(f"requests?{query}" for query in (*RANGES, *LIMITS, *CODES, "before=unknown", "before="))):
        refused(await app.account.get(f"/account/{query}"), 400, "REQUEST_MALFORMED")
    message = refused(await app.account.get("/account/requests?outcome=lost"), 400, "REQUEST_MALFORMED")["message"]
    assert message == "outcome: must be one of answered, interrupted, refused"


async def test_figures_and_csv_are_of_all_that_match(app: App) -> None:
    for _ in range(3):
        await app.ask("x")
    for _ in range(2):
        await app.post({"prompt": "x"}, headers={})
    await requests_of(app.account, 5)
    figures = (await app.account.get("/account/requests/figures?code=TOKEN_MISSING")).json()
    assert (figures["matching"], figures["logged"], figures["codes"]) == (2, 5, {"TOKEN_MISSING": 2})
    assert figures["values"] == {"apps": [app.name], "models": ["gpt-oss-120b"], "codes": ["TOKEN_MISSING"]}
    headers = {"Authorization": f"Bearer {app.account.key}", "Accept": "text/csv"}
    response = await app.gateway.http.get("/account/requests?outcome=answered", headers=headers)
    assert response.headers["Content-Disposition"] == 'attachment; filename="requests.csv"'
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert [(row["app"], row["status"], row["code"]) for row in rows] == [(app.name, "200", "")] * 3
    refused(await app.account.get("/account/requests/figures?from=noon"), 400, "REQUEST_MALFORMED")


# -- what operators read ---------------------------------------------------------------------------------------


async def test_what_operators_read(app: App, gw: Gateway) -> None:
    """Usage, requests and deploys of an account are what it sees itself; hours and spend are those of all accounts."""
    at, key = f"accounts/{app.account.id}", {"Authorization": f"Bearer {app.account.key}"}

    async def read(query: str) -> Any:
        answer = await gw.platform("GET", query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def count() -> int:
        earlier, now = await read("usage?hours=2")
        assert earlier["hour"] < now["hour"]
        return earlier["requests"] + now["requests"]

    before = await count()
    await app.ask("x")
    await app.post({"prompt": "x"}, headers={})
    await wait_until(lambda: read(f"{at}/requests"), holds=lambda rows: len(rows) == 2)
    for query in ("usage?by=hour&group=app", "usage?by=day&group=model", "requests?code=TOKEN_MISSING", "deploys"):
        own = await gw.http.get(f"/account/{query}", headers=key)
        assert own.status_code == 200
        assert await read(f"{at}/{query}") == own.json(), query
    rows = (await read(f"{at}/usage?group=model&app={app.name}"))["rows"]
    assert sum(row["requests"] for row in rows) == 2
    assert await read(f"{at}/usage?group=model&app=another") == {"rows": []}
    await wait_until(count, holds=lambda now: now >= before + 2)
    assert sum(hour["nanoEuro"] for hour in await read("usage?hours=2")) > 0

    (row,) = [row for row in (await read("spend"))["rows"] if row["account"] == app.account.id]
    assert row["nanoEuro"] > 0
    assert row["start"] == time.strftime("%Y-%m-01T00:00:00.000Z", time.gmtime())
    for path in ("spend", f"{at}/usage"):
        (row,) = (await read(f"{path}?by=month&group=provider"))["rows"]
        assert (row["provider"], row["requests"] > 0, row["nanoEuro"] > 0) == ("default", True, True)
    headers = {"Authorization": f"Bearer {OPERATOR}", "Accept": "text/csv"}
    answer = await gw.http.get("/platform/spend?by=month", headers=headers)
    heading, *lines = answer.text.splitlines()
    assert heading == "start,account,accountName,nanoEuro"
    assert any(app.account.id in line for line in lines)
    assert answer.headers["Content-Disposition"] == 'attachment; filename="spend-by-month.csv"'
    for path in ("usage", "requests", "deploys"):
        refused(await gw.platform("GET", f"accounts/acc_nobody/{path}"), 404, "NOT_FOUND")
    for query in (
        *("usage?hours=337", "usage?hours=0", f"{at}/usage?by=week"),
        *(f"spend?{query}" for query in ("from=noon", "by=hour", "group=app", "by=day&from=2026-01-01")),
    ):
        refused(await gw.platform("GET", query), 400, "REQUEST_MALFORMED")
