"""An account's receiver, its secrets, test events and log over HTTP. A real worker makes the deliveries."""

import asyncio
import base64
import json
import time
from datetime import datetime

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from gateway.accounts.vault import Vault
from gateway.errors import RequestMalformed
from gateway.events.webhooks import OVERLAP_SECONDS, Webhooks
from gateway.keys import previous_secret_key, webhook_key
from tests.fakes.receiver import FakeReceiver, verified
from tests.fakes.server import Exchange, Raw, answer
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.key_leaks import find_keys
from tests.support.responses import refused
from tests.support.stores import opened
from tests.support.webhook_holder import DELIVERIES, WEBHOOK, Holder
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROW = {"id", "attempt", "type", "app", "url", "at", "eventAt", "durationMs", "outcome", "sample", "redelivery"}


def when(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# -- the receiver --------------------------------------------------------------------------------------------


async def test_the_secret_is_shown_once_and_stored_encrypted(holder: Holder) -> None:
    shown = await holder.set()
    assert shown.keys() == {"url", "createdAt", "secret"}
    assert shown["url"] == holder.url
    assert shown["secret"].startswith("whsec_")
    assert len(base64.b64decode(shown["secret"].removeprefix("whsec_"), validate=True)) == 32
    response = await holder.call("GET")
    assert response.status_code == 200
    assert response.json() == {"url": shown["url"], "createdAt": shown["createdAt"]}
    with holder.account.gateway.redis.client() as redis:
        before = redis.get(webhook_key(holder.id))
        assert json.loads(before)["url"] == holder.url
        assert find_keys(redis, "whsec_") == {}
        assert await holder.set() == response.json(), "the same URL changes nothing"
        assert redis.get(webhook_key(holder.id)) == before


async def test_an_accounts_receiver_is_its_own(holder: Holder, gw: Gateway, receiver: FakeReceiver) -> None:
    for method, path in (("GET", WEBHOOK), ("POST", f"{WEBHOOK}/rotate")):
        refused(await holder.call(method, path), 404, "NOT_FOUND")
    other = Holder(await gw.account(), receiver)
    first = (await holder.set())["secret"]
    refused(await other.call("GET"), 404, "NOT_FOUND")
    second = (await other.set(holder.url))["secret"]
    assert [(await other.call("DELETE")).status_code for _ in range(2)] == [204, 204]
    refused(await other.call("GET"), 404, "NOT_FOUND")
    assert (await holder.call("GET")).status_code == 200
    assert len({first, second, (await other.set(holder.url))["secret"]}) == 3


async def test_malformed(holder: Holder) -> None:
    for body in ({}, *({"url": url} for url in (None, 1, "", "nonsense", "ftp://example.com/", "https://"))):
        assert "url" in refused(await holder.call("PUT", body=body), 400, "REQUEST_MALFORMED")["message"]
    response = await holder.call("PUT", body={"url": holder.url, "secret": "mine"})
    assert "secret" in refused(response, 400, "REQUEST_MALFORMED")["message"], "unknown fields are named"
    refused(await holder.call("GET"), 404, "NOT_FOUND")


# All forms of such addresses: tests/gateway/outbound/test_addresses.py
NOT_PUBLIC = ("http://example.com/", "https://2130706433/", "https://[64:ff9b::a00:1]/", "https://localhost./")
NOT_PUBLIC += ("https://169.254.169.254/latest/meta-data", "https://user:pass@example.com/")


async def test_an_address_that_is_not_public_changes_nothing(gw: Gateway) -> None:
    """A name that does not resolve yet may be a receiver's."""
    account = await gw.account()
    async with opened(gw.redis.url) as store:
        webhooks = Webhooks(store, Vault("a key"), allow_private=False)
        saved, _ = await webhooks.set_receiver(account.id, "https://93.184.215.14/hooks")
        for url in NOT_PUBLIC:
            with pytest.raises(RequestMalformed, match=r"^url: "):
                await webhooks.set_receiver(account.id, url)
        assert await webhooks.find_receiver(account.id) == saved
        began = time.monotonic()
        assert (await webhooks.set_receiver(account.id, "https://not-there-yet.invalid/hooks"))[1]
        assert time.monotonic() - began < 4


# -- test events ---------------------------------------------------------------------------------------------


async def test_a_sample_names_an_app_of_the_account(app: App, worker: Worker, receiver: FakeReceiver) -> None:
    holder = Holder(app.account, receiver)
    await holder.set()
    event_id = await holder.test("deploy.succeeded")
    (row,) = await holder.logged(1)
    envelope = verified(receiver.got(holder.path)[0], holder.secret)
    assert (envelope["type"], envelope["id"]) == (row["type"], row["id"]) == ("deploy.succeeded", event_id)
    assert (envelope["data"]["sample"], envelope["data"]["appName"], row["app"]) == (True, app.name, app.name)
    assert (row["outcome"], row["status"]) == ("delivered", 204)


# -- the log -------------------------------------------------------------------------------------------------


async def test_newest_first(holder: Holder, worker: Worker, receiver: FakeReceiver) -> None:
    assert await holder.log() == []
    await holder.set()
    ids = []
    for number in range(4):
        receiver.plays(holder.path, answer(500 + number))
        ids.append(await holder.test())
        await holder.logged(number + 1)
    rows = await holder.log()
    assert [row["id"] for row in rows] == ids[::-1]
    assert [row["status"] for row in rows] == [503, 502, 501, 500]
    for row in rows:
        assert row.keys() == ROW | {"status", "error"}
        assert (row["url"], row["sample"], row["redelivery"]) == (holder.url, True, 0)
        assert abs(when(row["eventAt"]) - when(row["at"])) < 10
        assert (row["outcome"], row["error"]) == ("failed", "status")
        assert 0 <= row["durationMs"] < 5000
        assert (row["at"][-1], len(row["at"])) == ("Z", 24)
    assert [row["id"] for row in await holder.log("?limit=2")] == ids[:1:-1]
    assert len(await holder.log("?limit=1000")) == 4
    for limit in ("0", "1001", "x", ""):
        response = await holder.call("GET", f"{DELIVERIES}?limit={limit}")
        assert "limit" in refused(response, 400, "REQUEST_MALFORMED")["message"]


async def test_a_redelivery_goes_to_the_present_receiver(
    holder: Holder, worker: Worker, receiver: FakeReceiver
) -> None:
    """It is signed with the present secret, even if the event was dropped without a receiver."""
    event_id = await holder.test()
    await holder.logged(1)
    await holder.set()
    assert (await holder.call("POST", f"{DELIVERIES}/{event_id}/redeliver")).status_code == 202
    assert (await holder.logged(2))[0]["outcome"] == "delivered"
    assert verified(receiver.got(holder.path)[0], holder.secret)["id"] == event_id


# -- from the crash to the receiver --------------------------------------------------------------------------


async def test_a_crash_arrives(gw: Gateway, app: App, worker: Worker, receiver: FakeReceiver) -> None:
    holder = Holder(app.account, receiver)
    await holder.set()
    app_id = (await holder.call("GET", "/account/apps")).json()[0]["id"]
    for number, crash in enumerate(({"reason": "oom", "exitCode": 137}, {"reason": "exit"})):
        response = await gw.platform("POST", f"apps/{app.name}/crashes", crash)
        assert response.status_code == 202
        row, *_ = await holder.logged(number + 1)
        envelope = verified(receiver.got(holder.path)[-1], holder.secret)
        assert envelope["type"] == "app.crashed"
        assert envelope["id"] == row["id"] == response.json()["id"]
        assert abs(envelope["timestamp"] / 1000 - time.time()) < 10
        data = envelope["data"]
        assert abs(time.time() - when(data.pop("at"))) < 10
        assert data == {"appId": app_id, "appName": app.name, "exitCode": None, **crash}
        assert (row["app"], row["outcome"]) == (app.name, "delivered")


# -- after a rotation both secrets sign, each as a Standard Webhooks library verifies it ----------------------


async def rotate(holder: Holder) -> str:
    response = await holder.call("POST", f"{WEBHOOK}/rotate")
    assert response.status_code == 200, response.text
    assert response.json().keys() == {"secret"}
    secret: str = response.json()["secret"]
    holder.account.gateway.confidential.add(secret)
    return secret


async def sent(holder: Holder, receiver: FakeReceiver) -> Exchange:
    before = len(receiver.got(holder.path))
    await holder.test()
    await holder.logged(before + 1)
    return receiver.got(holder.path)[-1]


def verifies(exchange: Exchange, secret: str) -> bool:
    names = ("webhook-id", "webhook-timestamp", "webhook-signature")
    try:
        Webhook(secret).verify(exchange.body, {name: exchange.header(name) or "" for name in names})
    except WebhookVerificationError:
        return False
    return True


async def test_both_secrets_sign_for_a_day(holder: Holder, worker: Worker, receiver: FakeReceiver) -> None:
    await holder.set()
    first = holder.secret
    second = await rotate(holder)
    exchange = await sent(holder, receiver)
    verified(exchange, second)  # X-Service-Signature is the new one's
    assert verifies(exchange, first)
    assert len((exchange.header("webhook-signature") or "").split(" ")) == 2

    third = await rotate(holder)
    exchange = await sent(holder, receiver)
    verified(exchange, third)
    assert [verifies(exchange, secret) for secret in (third, second, first)] == [True, True, False]

    key = previous_secret_key(holder.id)
    with holder.account.gateway.redis.client() as redis:
        assert OVERLAP_SECONDS - 60 < redis.ttl(key) <= OVERLAP_SECONDS == 24 * 3600
        shown = (await holder.call("GET")).json()
        assert shown["url"] == holder.url
        assert len(shown["previousSecretUntil"]) == 24
        redis.pexpire(key, 1)  # the day is over, by the clock of Redis
        await asyncio.sleep(0.01)
    exchange = await sent(holder, receiver)
    verified(exchange, third)
    assert not verifies(exchange, second)
    assert "previousSecretUntil" not in (await holder.call("GET")).json()


async def test_another_url_ends_both_secrets(holder: Holder, worker: Worker, receiver: FakeReceiver) -> None:
    """A new receiver gets no signatures with the secret of the previous one."""
    await holder.set()
    second = await rotate(holder)
    same = await holder.set()
    assert "secret" not in same, "the same URL changes nothing"
    first, holder.url = holder.secret, receiver.url(holder.path + "-2")
    holder.path += "-2"
    third = (await holder.set())["secret"]
    exchange = await sent(holder, receiver)
    verified(exchange, third)
    assert [verifies(exchange, secret) for secret in (first, second)] == [False, False]
    await rotate(holder)
    assert (await holder.call("DELETE")).status_code == 204
    with holder.account.gateway.redis.client() as redis:
        assert not redis.exists(previous_secret_key(holder.id))


async def test_both_secrets_are_encrypted_and_neither_is_logged(
    holder: Holder, worker: Worker, receiver: FakeReceiver
) -> None:
    """A receiver that echoes the request and prints both secrets cannot put them into the log."""
    await holder.set()
    second = await rotate(holder)

    async def echo(exchange: Exchange) -> None:
        body = f"{exchange.header('webhook-signature')} {holder.secret} {second}"
        head = f"X-Env: {holder.secret}\r\nX-Echo: {exchange.header('x-service-signature')}\r\n"
        whole = f"HTTP/1.1 500 Status\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}"
        await exchange.play([Raw(whole.encode())])

    receiver.plays(holder.path, echo)
    exchange = await sent(holder, receiver)
    [row] = await holder.log()
    shown = (await holder.call("GET", f"{DELIVERIES}/{row['attempt']}")).json()["response"]
    assert shown["body"] == "v1,(not kept) v1,(not kept) (not kept) (not kept)"
    assert shown["headers"]["X-Env"] == "(not kept)"
    assert shown["headers"]["X-Echo"] == "sha256=(not kept)"
    assert (exchange.header("webhook-signature") or "").count("v1,") == 2
    with holder.account.gateway.redis.client() as redis:
        record = json.loads(redis.get(webhook_key(holder.id)) or b"")
        sealed = (redis.get(previous_secret_key(holder.id)) or b"").decode()
    assert sealed
    assert "whsec_" not in record["secret"] + sealed
