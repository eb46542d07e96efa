"""The version before, beside this one on the same Redis: it reads no record as more than it is, and loses none.

The version before is a commit of this repository that knows neither scopes of keys, nor members, nor deletions.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from gateway.keys import LAYOUT_MINOR_KEY, account_key
from gateway.redis.scripts import CHANGES_CHANNEL
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import Account, App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.versions import unpack_version
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")
FORMER = "2287f737ec7b"
STOPPED = (0, -15)  # exit codes of a gateway after SIGTERM
FULL, SCOPED = ("GET", "/account/keys"), ("GET", "/account/deploys")  # calls of a full key, and of one for deploys


class Versions:
    """A gateway of the version before, and one of this version."""

    def __init__(self, old: Gateway, new: Gateway) -> None:
        self.old, self.new = old, new
        self.redis = new.redis

    async def account(self) -> Account:
        account = await self.old.account()
        self.new.confidential.add(account.key)
        return Account(self.new, account.id, account.key)

    async def add_key(self, account: Account, **fields: str) -> tuple[Account, str]:
        """Returns the same account with a new key, and the id of the key."""
        made = (await account.call("POST", "/account/keys", fields)).json()
        self.old.confidential.add(made["key"])
        self.new.confidential.add(made["key"])
        return Account(account.gateway, account.id, made["key"]), made["id"]

    async def statuses(self, account: Account) -> list[list[int]]:
        """Returns the statuses of both calls at the old version, and at the new one."""
        return [
            [(await account.call(*call, at=each)).status_code for call in (SCOPED, FULL)]
            for each in (self.old, self.new)
        ]

    async def session_statuses(self, visitor: Visitor) -> list[int]:
        """Returns the statuses of a call with the visitor's session at both versions."""
        await visitor.http.aclose()
        cookies = {"Cookie": "; ".join(f"{each.name}={each.value}" for each in visitor.http.cookies.jar)}
        return [(await each.http.request(*SCOPED, headers=cookies)).status_code for each in (self.old, self.new)]


@module_fixture
async def versions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Versions]:
    data = tmp_path_factory.mktemp("data")
    (folder := data / "former").mkdir()
    prefix = await asyncio.to_thread(unpack_version, FORMER, folder)
    with RedisServer() as redis:
        async with FakeProvider() as provider, contextlib.AsyncExitStack() as stack:
            old, new = Gateway(redis.url, provider, data, prefix=prefix), Gateway(redis.url, provider, data)
            for each in (old, new):
                each.redis = redis
                stack.push_async_callback(each.http.aclose)
                stack.push_async_callback(each.stop)
                await each.start()
            yield Versions(old, new)
        for each in (old, new):
            each.assert_log_is_clean()


async def restart(gateway: Gateway) -> None:
    assert await gateway.stop() in STOPPED
    await gateway.start()


async def test_scoped_keys_and_members_are_nobody_for_the_version_before(versions: Versions) -> None:
    account = await versions.account()
    scoped, key_id = await versions.add_key(account, name="CI", scope="deploy")
    assert await versions.statuses(account) == [[200, 200], [200, 200]]
    assert await versions.statuses(scoped) == [[401, 401], [200, 403]]
    taken = await scoped.call("POST", "/account/keys", {"name": "taken"}, at=versions.old)
    assert taken.status_code == 401

    reader, _ = await versions.add_key(account, name="reports", scope="read")
    visitor = Visitor(versions.new)
    assert (await visitor.log_in(reader.key)).is_success
    assert await versions.session_statuses(visitor) == [401, 200]
    member = Visitor(versions.new)
    await member.join(account, "vera@example.com", "viewer")
    assert await versions.session_statuses(member) == [401, 200]

    listed = await account.call("GET", "/account/keys", at=versions.old)
    assert [key["name"] for key in listed.json()] == ["first"]
    assert (await account.call("DELETE", f"/account/keys/{key_id}", at=versions.old)).status_code == 404


async def test_an_account_that_is_deleted_is_suspended_for_the_version_before(versions: Versions) -> None:
    async with FakeAppBackend() as backend:
        account = await versions.account()
        app = await account.app(backend)
        begun = await account.call("POST", "/account/deletion", {"name": (await account.get()).json()["name"]})
        assert begun.status_code == 202, begun.text
        assert await ask(versions, app) == [403, 403]
        assert "suspension" not in (await account.get()).json(), "the account sees when it is deleted"

        # The record as it was before a deletion suspended too: the version before serves the account.
        with versions.redis.client() as client:
            record = json.loads(client.get(account_key(account.id)))
            del record["suspension"]
            client.set(account_key(account.id), json.dumps(record))
            client.publish(CHANGES_CHANNEL, account_key(account.id))
            client.delete(LAYOUT_MINOR_KEY)
        await wait_until(lambda: asks_as(versions, app, [200, 403]))
        await restart(versions.new)
        await wait_until(lambda: asks_as(versions, app, [403, 403]))

        assert (await account.call("DELETE", "/account/deletion")).status_code == 204
        await wait_until(lambda: asks_as(versions, app, [200, 200]))


async def ask(versions: Versions, app: App) -> list[int]:
    return [(await app.at(each).ask("x")).status_code for each in (versions.old, versions.new)]


async def asks_as(versions: Versions, app: App, statuses: list[int]) -> bool:
    return await ask(versions, app) == statuses
