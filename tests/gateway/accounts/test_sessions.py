"""Sessions of the pages: their cookies, their ends, and the limits on log-ins."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from gateway.accounts.session_store import SESSION_SECONDS
from gateway.accounts.sessions import ACCOUNT, FAILED_LOGINS, UNREADABLE, Sessions, client_network
from gateway.errors import CsrfRefused
from gateway.settings import Settings
from tests.fakes import FakeAppBackend
from tests.support.accounts import Account
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_log_in_sets_a_cookie_that_scripts_cannot_read(gw: Gateway, visitor: Visitor, account: Account) -> None:
    """Only a hash of its token is stored. It ends with a log-out, wherever the cookie was copied to, and by itself."""
    response = await visitor.log_in(account.key)
    assert (response.status_code, response.content) == (204, b"")
    _, *attributes = response.headers["set-cookie"].split("; ")
    assert set(attributes) == {"HttpOnly", "Path=/", "SameSite=strict", f"Max-Age={SESSION_SECONDS}"}
    assert (await visitor.call("GET", "/account")).json()["id"] == account.id
    assert account.key not in str(response.headers)
    first = visitor.token
    assert (await visitor.call("DELETE", "/dashboard/session")).status_code == 204
    assert ACCOUNT not in visitor.http.cookies
    copied = await gw.http.get("/account", headers={"Cookie": f"{ACCOUNT}={first}"})
    refused(copied, 401, "UNAUTHORIZED")
    assert (await visitor.call("DELETE", "/dashboard/session")).status_code == 204
    await visitor.log_in(account.key)
    gw.redis.freeze()
    try:
        refused(await visitor.call("GET", "/account"), 503, "BACKBONE_UNAVAILABLE")
    finally:
        gw.redis.thaw()
    with gw.redis.client() as client:
        [key] = [k for k in client.scan_iter("session:*", count=1000) if account.id.encode() in client.get(k)]
        assert visitor.token.encode() not in key
        assert 0 < client.ttl(key) <= SESSION_SECONDS
        client.delete(key)  # as when it expires
        refused(await visitor.call("GET", "/account"), 401, "UNAUTHORIZED")
        await visitor.log_in(account.key)
        [key] = client.keys(f"*:account:{account.id}")
        client.delete(key)
        client.publish("changes", key)
    await wait_until(lambda: visitor.call("GET", "/account"), holds=lambda answer: answer.status_code == 401)


@pytest.mark.parametrize("origin", ["", "null", "http://demo.apps.localhost"])
async def test_another_sites_page_changes_nothing(visitor: Visitor, account: Account, origin: str) -> None:
    refused(await visitor.log_in(account.key, Origin=origin), 403, "CSRF_REFUSED")
    await visitor.log_in(account.key)
    hook = "https://evil.example/"
    refused(await visitor.call("PUT", "/account/webhook", {"url": hook}, Origin=origin), 403, "CSRF_REFUSED")
    refused(await visitor.call("DELETE", "/account/webhook", Origin=origin), 403, "CSRF_REFUSED")
    refused(await visitor.call("DELETE", "/dashboard/session", Origin=origin), 403, "CSRF_REFUSED")
    assert (await visitor.call("GET", "/account/webhook", Origin=origin)).status_code == 404
    elsewhere = {"Host": "gateway.internal:8000", "Origin": "http://gateway.internal:8000"}
    assert (await visitor.call("DELETE", "/account/webhook", **elsewhere)).status_code == 204, "either host name"
    # The key is proof enough: no browser sends it automatically.
    bearer = {"Origin": origin, "Authorization": f"Bearer {account.key}"}
    assert (await visitor.call("DELETE", "/account/webhook", **bearer)).status_code == 204


async def test_a_key_takes_precedence_and_a_forged_cookie_is_refused(
    visitor: Visitor, account: Account, backend: FakeAppBackend
) -> None:
    """Inference ignores cookies."""
    app = await account.app(backend)
    await visitor.log_in(account.key)
    refused(await visitor.call("POST", app.path, {"prompt": "Hello?"}, Origin=""), 401, "TOKEN_MISSING")
    refused(await visitor.call("GET", "/account", Authorization="Bearer csk_wrong"), 401, "UNAUTHORIZED")
    for token in ("x", "", account.id, "operator"):
        refused(await visitor.call("GET", "/account", Cookie=f"{ACCOUNT}={token}"), 401, "UNAUTHORIZED")


async def test_failed_log_ins_are_counted_by_address(gw: Gateway, visitor: Visitor, account: Account) -> None:
    answers = await asyncio.gather(*(visitor.log_in(f"csk_{n}") for n in range(3 * FAILED_LOGINS.limit)))
    statuses = [answer.status_code for answer in answers]
    assert (statuses.count(401), statuses.count(429)) == (FAILED_LOGINS.limit, 2 * FAILED_LOGINS.limit)
    assert not any("set-cookie" in answer.headers for answer in answers)
    refused(await visitor.log_in(account.key), 429, "LOGINS_LIMITED")
    with gw.redis.client() as client:
        counters = list(client.scan_iter("logins:*", count=1000))
        # A counter of another test may expire meanwhile (-2), but none lives forever (-1).
        assert all(client.ttl(key) != -1 and client.ttl(key) <= 60 for key in counters)
        assert visitor.headers["X-Forwarded-For"].split()[1] not in str(counters)
    assert (await visitor.log_in(account.key, **{"X-Forwarded-For": "203.0.113.9"})).status_code == 204


async def test_failed_log_ins_are_counted_by_network(visitor: Visitor, account: Account) -> None:
    """A provider gives each customer at least a /64. Some proxies append the port, which each connection changes."""
    limit = FAILED_LOGINS.limit
    for report, other in (
        ("[2606:4700:9::{0}]:{0}", "[2606:4700:10::1]:1"),
        ("93.184.216.41:{}", "93.184.216.42:1"),
        ("no address {}", "93.184.216.43"),
    ):
        answers = [await visitor.log_in("csk_wrong", **{"X-Forwarded-For": report.format(n)}) for n in range(limit + 1)]
        assert [answer.status_code for answer in answers] == [401] * limit + [429], report
        assert (await visitor.log_in(account.key, **{"X-Forwarded-For": other})).status_code == 204


async def test_the_address_is_trusted_only_from_a_private_proxy() -> None:
    for peer, forwarded, network in (
        ("8.8.8.8", [], "8.8.8.8/32"),
        ("10.0.0.2", ["1.1.1.1, 203.0.113.9"], "203.0.113.9/32"),
        ("10.0.0.2", ["203.0.113.9:51234"], "203.0.113.9/32"),
        ("10.0.0.2", ["1.1.1.1, 203.0.113.999:1"], UNREADABLE),
        ("::1", ["1.1.1.1", "2001:db8::1"], "2001:db8::/64"),
        ("::1", ["[2001:db8::1]:51234"], "2001:db8::/64"),
        ("2001:4860:4860::8888", ["1.1.1.1"], "2001:4860:4860::/64"),
        ("", ["203.0.113.9"], "203.0.113.9/32"),
        ("", [], ""),
        ("::ffff:8.8.8.8", [], "8.8.8.8/32"),
        ("::1", ["::ffff:203.0.113.9"], "203.0.113.9/32"),
    ):
        client, headers = SimpleNamespace(host=peer), SimpleNamespace(getall=lambda *_, found=forwarded: found)
        request = SimpleNamespace(client=client if peer else None, headers=headers)
        assert client_network(request) == network, (peer, forwarded)


async def test_behind_tls_the_cookie_is_secure_and_bound_to_the_host() -> None:
    cookie = Sessions(None, Settings(base_url="https://api.example.com")).build_cookie(ACCOUNT, "token")
    assert cookie.secure
    assert cookie.key == f"__Host-{ACCOUNT}"
    assert cookie.domain is None


@pytest.mark.parametrize(
    ("base", "origin", "own"),
    [
        ("https://api.example.com", "https://api.example.com", True),
        ("https://api.example.com", "https://10.0.0.2:8000", True),
        ("https://api.example.com", "http://api.example.com", False),
        ("https://api.example.com", "http://10.0.0.2:8000", False),
        ("http://api.example.com", "http://10.0.0.2:8000", True),
    ],
)
async def test_a_page_without_tls_is_foreign_to_a_service_with_it(base: str, origin: str, own: bool) -> None:
    """The proxy that ends TLS sends plain HTTP to this process, with the name that the page has used."""
    headers = {"host": "10.0.0.2:8000", "origin": origin}
    request = SimpleNamespace(method="POST", headers=headers, scope={"scheme": "http"})
    with contextlib.nullcontext() if own else pytest.raises(CsrfRefused):
        Sessions(None, Settings(base_url=base)).require_own_origin(request)


async def test_a_key_has_at_most_twenty_sessions(visitor: Visitor, account: Account) -> None:
    tokens = []
    for _ in range(25):  # more than the failed log-ins that an address may have: those that succeed do not count
        assert (await visitor.log_in(account.key)).status_code == 204
        tokens.append(visitor.token)
    visitor.http.cookies.clear()
    answers = [await visitor.call("GET", "/account", Cookie=f"{ACCOUNT}={token}") for token in tokens]
    assert [answer.status_code for answer in answers] == [401] * 5 + [200] * 20


async def test_an_address_can_make_a_share_of_the_days_registrations(gw: Gateway) -> None:
    """So one client cannot use up the registrations of a day."""

    async def register(address: str) -> int:
        answer = await gw.http.post("/register", json={"name": "x"}, headers={"X-Forwarded-For": address})
        return answer.status_code

    share = max(3, Settings().registrations_per_day // 10)
    assert [await register("93.184.216.34") for _ in range(share + 1)] == [201] * share + [429]
    assert await register("93.184.216.34:5") == 429, "one address"
    assert await register("93.184.216.35") == 201
    assert [await register(f"2606:4700::{n}") for n in range(share + 1)] == [201] * share + [429], "one network"
    assert await register("2606:4700:1::1") == 201
    assert [await register("") for _ in range(share + 1)] == [201] * (share + 1), "a proxy that reports none"
