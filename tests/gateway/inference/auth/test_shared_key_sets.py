"""Processes share apps' key sets, and use no key for longer than one that they fetched themselves."""

import asyncio
import json
from typing import Any

import pytest

from gateway.accounts.records import JwksAuth
from gateway.accounts.vault import Vault
from gateway.errors import TokenInvalid
from gateway.inference.auth.users import Users
from gateway.keys import key_set_keys
from gateway.outbound import client as outbound
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.fakes.backend import jwk, private_key
from tests.gateway.inference.admissions import EVALSHA
from tests.gateway.inference.key_hosts import Hosts, age, an_app, key_set, token
from tests.support.polling import wait_until
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy

HOST = "victim.apps.example"
APP = an_app(auth=JwksAuth())


@pytest.fixture
def hosts() -> Hosts:
    hosts = Hosts()
    hosts.keys[HOST] = private_key("ES256")
    return hosts


def process(hosts: Hosts, store: Store | None) -> Users:
    return Users(Settings(apps_domain="apps.example"), Vault(""), hosts, store)


async def shared(users: Users) -> None:
    """Waits until the process has shared its keys."""
    task = key_set(users)._sharing
    assert task is not None
    await task


async def with_keys(hosts: Hosts, store: Store, count: int, seconds: float = 60) -> list[Users]:
    """Returns processes whose keys are so old."""
    users = [process(hosts, store) for _ in range(count)]
    for each in users:
        await each.verify(APP, token(hosts.keys[HOST], "ana", HOST))
        await shared(users[0])
        age(each, seconds)
    return users


async def age_copy(store: Store, seconds: int) -> None:
    """Makes the shared copy older."""
    copy = key_set_keys(APP.account, APP.id)[0]
    await store.client.hset(copy, "at", int(await store.client.hget(copy, "at")) - seconds * 1000)


async def test_one_process_fetches_for_all(hosts: Hosts, store: Store) -> None:
    users = [process(hosts, store) for _ in range(5)]
    key = hosts.keys[HOST]
    verified = await asyncio.gather(*(each.verify(APP, token(key, f"u{n}", HOST)) for n, each in enumerate(users)))
    assert verified == [f"u{n}" for n in range(5)]
    assert hosts.fetched == [HOST]
    await shared(users[0])
    assert await process(hosts, store).verify(APP, token(key, "late", HOST)) == "late"
    assert hosts.fetched == [HOST]


async def test_a_copy_is_as_old_as_its_fetch(hosts: Hosts, store: Store, proxy: Proxy) -> None:
    """It does not matter how long Redis takes to share it."""

    class Watched(Hosts):
        async def fetch(self, method: str, url: str, **options: Any) -> outbound.Response:
            proxy.hold_requests = EVALSHA  # of what follows: the keys are shared
            return await hosts.fetch(method, url, **options)

    async with opened(proxy.url) as slow:
        one, two = process(Watched(), slow), process(hosts, store)
        await one.verify(APP, token(hosts.keys[HOST], "ana", HOST))
        await wait_until(lambda: proxy.held)
        await asyncio.sleep(0.3)
        proxy.let_go()
        await shared(one)
    await two.verify(APP, token(hosts.keys[HOST], "ben", HOST))
    assert hosts.fetched == [HOST]
    assert key_set(two).fresh_until <= key_set(one).fresh_until


async def test_a_rotated_key_is_found_at_once(hosts: Hosts, store: Store) -> None:
    """This also holds for a process that only has a copy from before the rotation."""
    one, two, three = (process(hosts, store) for _ in range(3))
    hosts.kid = "before"
    await one.verify(APP, token(hosts.keys[HOST], "ana", "before"))
    await shared(one)
    await two.verify(APP, token(hosts.keys[HOST], "ben", "before"))
    await age_copy(store, 60)
    for users in (one, two):
        age(users, 60)
    hosts.keys[HOST], hosts.kid = private_key("ES256"), "after"
    for users in (three, two, one):
        assert await users.verify(APP, token(hosts.keys[HOST], "cid", "after")) == "cid"
        await shared(three)
    assert len(hosts.fetched) == 2


async def test_a_replaced_key_is_fetched_once_for_all(hosts: Hosts, store: Store) -> None:
    """The new key has the `kid` of the old one."""
    users = await with_keys(hosts, store, 3)
    await age_copy(store, 60)
    hosts.keys[HOST] = private_key("ES256")
    for each in users:
        assert await each.verify(APP, token(hosts.keys[HOST], "ben", HOST)) == "ben"
        await shared(users[0])
    for n in range(30):
        with pytest.raises(TokenInvalid):
            await users[n % 3].verify(APP, token(private_key("ES256"), f"m{n}", HOST if n % 2 else f"unknown-{n}"))
    assert len(hosts.fetched) == 2


async def test_another_address_has_other_keys(hosts: Hosts, store: Store) -> None:
    one = process(hosts, store)
    await one.verify(APP, token(hosts.keys[HOST], "ana", HOST))
    await shared(one)
    moved = an_app(auth=JwksAuth(url="https://else.example/keys"))
    hosts.keys["else.example"] = private_key("ES256")
    assert await process(hosts, store).verify(moved, token(hosts.keys["else.example"], "b", "else.example")) == "b"
    for other in (moved, an_app(auth=JwksAuth(), account="acc_2"), an_app(auth=JwksAuth(issuer="x"))):
        with pytest.raises(TokenInvalid):
            await process(hosts, store).verify(other, token(private_key("ES256"), "m", HOST))
    assert len(hosts.fetched) >= 4


async def test_redis_gets_no_private_members(store: Store) -> None:
    private = {"d": "c2VjcmV0", "p": "c2VjcmV0", "k": "c2VjcmV0", "x5c": ["c2VjcmV0"], "comment": "c2VjcmV0"}
    signing = {alg: private_key(alg) for alg in ("ES256", "RS256", "EdDSA")}
    document = [jwk(alg, key, alg) | private for alg, key in signing.items()]
    document.append({"kty": "oct", "k": "c2VjcmV0", "kid": "symmetric"})

    class Careless(Hosts):
        async def fetch(self, method: str, url: str, **options: Any) -> outbound.Response:
            return outbound.Response(200, {}, json.dumps({"keys": document, "note": "c2VjcmV0"}).encode())

    one, two = process(Careless(), store), process(Hosts(), store)
    for users in (one, two):
        for n in range(2):
            assert await users.verify(APP, token(signing["ES256"], f"u{n}", "ES256")) == f"u{n}"
        await shared(one)
    held = await store.client.hgetall(key_set_keys(APP.account, APP.id)[0])
    assert "c2VjcmV0" not in str(held)
    assert "symmetric" not in str(held)
    assert [(key.kid, key.algorithms) for key in key_set(one)._keys] == [
        (key.kid, key.algorithms) for key in key_set(two)._keys
    ]


async def test_without_redis_each_process_fetches(hosts: Hosts) -> None:
    async with opened("redis://127.0.0.1:1/0") as away:
        for n in range(2):
            assert await process(hosts, away).verify(APP, token(hosts.keys[HOST], f"u{n}", HOST)) == f"u{n}"
        assert hosts.fetched == [HOST, HOST]
