"""The pages' files and colors, and the operators' page: access, figures, and the end of its stream."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx_sse
import msgspec
import pytest

from gateway.accounts.session_store import SESSION_SECONDS
from gateway.accounts.sessions import ACCOUNT, FAILED_LOGINS, OPERATOR
from gateway.accounts.viewers import FIGURES
from gateway.api.assets import bundles
from gateway.deploys.pods import NodeLoad, PodReport, write_pod_report
from gateway.keys import PODS_KEY
from tests.fakes import FakeAppBackend
from tests.fakes.provider import ROLE, tokens
from tests.gateway.conftest import COUNTED_SOON, Launch
from tests.support.gateway_process import OPERATOR as TOKEN
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused
from tests.support.stores import opened
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")
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
        ("dashboard.css", "text/css"),
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


# -- the operators' page --------------------------------------------------------------------------------------

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def watching(gw: Gateway, **headers: str) -> AsyncIterator[AsyncIterator[httpx_sse.ServerSentEvent]]:
    async with httpx_sse.aconnect_sse(gw.http, "GET", "/ops/events", headers=headers or BEARER) as source:
        yield source.aiter_sse()


async def snapshot(gw: Gateway) -> dict[str, Any]:
    async with watching(gw) as seen:
        return json.loads((await anext(seen)).data)


# -- who gets in ---------------------------------------------------------------------------------------------


async def test_a_log_in_sets_a_cookie_that_scripts_cannot_read(visitor: Visitor) -> None:
    response = await visitor.log_in_as_operator()
    assert (response.status_code, response.content) == (204, b"")
    _, *attributes = response.headers["set-cookie"].split("; ")
    assert set(attributes) == {"HttpOnly", "Path=/", "SameSite=strict", f"Max-Age={SESSION_SECONDS}"}
    evil = "http://demo.apps.localhost"
    refused(await visitor.call("DELETE", "/ops/session", Origin=evil), 403, "CSRF_REFUSED")
    assert (await visitor.call("GET", "/platform/inference")).status_code == 200


async def test_an_account_is_not_an_operator(gw: Gateway, visitor: Visitor) -> None:
    """Nor is a page of another site. Failed log-ins are limited, as those of account holders are."""
    account, evil = await gw.account(), "http://demo.apps.localhost"
    refused(await visitor.log_in_as_operator(Origin=evil), 403, "CSRF_REFUSED")
    for n in range(FAILED_LOGINS.limit - 1):
        refused(await visitor.log_in_as_operator(f"wrong {n}"), 401, "UNAUTHORIZED")
    refused(await visitor.log_in_as_operator(account.key), 401, "UNAUTHORIZED")
    refused(await visitor.log_in_as_operator(), 429, "LOGINS_LIMITED")
    visitor = Visitor(gw)
    response = await visitor.call("POST", "/dashboard/session", {"apiKey": account.key})
    session = response.cookies[ACCOUNT]
    gw.confidential.add(session)
    for cookie in (session, "wrong", ""):
        headers = {"Cookie": f"{OPERATOR}={cookie}"} if cookie else {}
        for path in ("/platform/inference", "/ops/events"):
            refused(await gw.http.get(path, headers=headers), 401, "UNAUTHORIZED")
    await visitor.http.aclose()


async def test_a_session_ends_with_the_token_it_was_opened_with(gw: Gateway, visitor: Visitor) -> None:
    await visitor.log_in_as_operator()
    with gw.redis.client() as client:
        mine = [k for k in client.scan_iter("session:*", count=1000) if client.get(k).startswith(b"operator")]
        for key in mine:
            assert 0 < client.ttl(key) <= SESSION_SECONDS
            client.set(key, "operator:" + "0" * 32, keepttl=True)  # as if another token were set now
    refused(await visitor.call("GET", "/platform/inference"), 401, "UNAUTHORIZED")


# -- what is told --------------------------------------------------------------------------------------------


async def test_the_figures_follow_events(launch: Launch, backend: FakeAppBackend, tmp_path: Path) -> None:
    """On Kubernetes, they have the report of the pods."""
    report = PodReport("2026-11-28T09:00:00.000Z", total=3, nodes=[NodeLoad("node-1", 2, 400_000_000, 1_600_000_000)])
    settings = {"GATEWAY_APPS_ENGINE": "kubernetes", "GATEWAY_STORAGE_URL": f"file://{tmp_path}"}
    async with launch(COUNTED_SOON, **settings) as gw:
        assert (await snapshot(gw))["pods"] == msgspec.to_builtins(PodReport())
        async with opened(gw.redis.url) as store:
            await write_pod_report(store, report)
            await wait_until(lambda: snapshot(gw), holds=lambda seen: seen["pods"] == msgspec.to_builtins(report))
            await store.client.delete(PODS_KEY)  # as when it expires
        app = await gw.app(backend)
        for _ in range(2):
            await app.events("x")
        refused(await app.ask(""), 400, "REQUEST_MALFORMED")
        await gw.platform("POST", f"apps/{app.name}/crashes", {"reason": "oom"})
        seen = await wait_until(
            lambda: snapshot(gw), holds=lambda seen: sum(minute["requests"] for minute in seen["minutes"]) == 3
        )
        assert seen["pods"]["at"] is None
        assert sum(minute["codes"].get("REQUEST_MALFORMED", 0) for minute in seen["minutes"]) == 1
        assert sum(minute["streams"] for minute in seen["minutes"]) == 2
        assert 0 < seen["firstToken"]["p50"] <= seen["firstToken"]["p99"]
        [top] = seen["spend"]["top"]
        assert top["account"] == app.account.id
        assert top["settled"] == seen["spend"]["total"] == await app.account.settled()
        assert (seen["webhooks"]["waiting"], seen["webhooks"]["pending"], seen["workers"]) == (1, 0, [])
        release = asyncio.Event()
        asking = asyncio.create_task(app.ask(gw.provider.plays(ROLE, release, tokens("late"))))
        await wait_until(lambda: snapshot(gw), holds=lambda seen: seen["gateways"][0]["streams"] == 1)
        release.set()
        assert (await asking).status_code == 200


async def test_the_number_of_viewers_is_limited_and_a_drain_ends_their_streams(launch: Launch) -> None:
    """One operator leaves half of the streams to others."""
    bob = "bob-has-a-token-of-his-own"
    async with launch(GATEWAY_OPERATOR_TOKENS=f"bob={bob}") as gw, AsyncExitStack() as viewers:
        gw.confidential.add(bob)
        half = FIGURES.limit // 2
        seen = [await viewers.enter_async_context(watching(gw)) for _ in range(half)]
        for each in seen:
            await anext(each)
        refused(await gw.http.get("/ops/events", headers=BEARER), 429, "VIEWERS_LIMITED")
        bobs = await viewers.enter_async_context(watching(gw, Authorization=f"Bearer {bob}"))
        await anext(bobs)
        await viewers.aclose()

        async def room() -> bool:
            async with gw.http.stream("GET", "/ops/events", headers=BEARER) as response:
                return response.status_code == 200

        await wait_until(room)
        headers = {"Authorization": f"Bearer {(await gw.account()).key}"}
        async with watching(gw) as last, gw.http.stream("GET", "/account/changes", headers=headers) as changes:
            await anext(last)
            stopping = asyncio.create_task(gw.stop())
            async with asyncio.timeout(8):
                while await anext(last, None):
                    pass
                await changes.aread()
            assert await stopping is not None  # it was not killed
