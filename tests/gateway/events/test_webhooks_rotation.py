"""After a rotation both secrets sign for a day, each as a Standard Webhooks library verifies it."""

import asyncio
import json

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from gateway.events.webhooks import OVERLAP_SECONDS
from gateway.keys import previous_secret_key, webhook_key
from tests.fakes.receiver import FakeReceiver, verified
from tests.fakes.server import Exchange, Raw
from tests.support.webhook_holder import DELIVERIES, WEBHOOK, Holder
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")


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


async def test_after_concurrent_rotations_the_last_two_sign(
    holder: Holder, worker: Worker, receiver: FakeReceiver
) -> None:
    await holder.set()
    secrets = await asyncio.gather(*(rotate(holder) for _ in range(4)))
    assert len(set(secrets)) == 4
    exchange = await sent(holder, receiver)
    assert sum(verifies(exchange, secret) for secret in (holder.secret, *secrets)) == 2


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
