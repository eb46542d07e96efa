"""An account is stopped, kept or deleted; after that, Redis and the storage are searched for what names it."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from gateway.accounts.api_keys import digest
from gateway.accounts.records import App as AppRecord
from gateway.accounts.registry import Registry
from gateway.accounts.suspended import SuspendedList
from gateway.accounts.vault import Vault
from gateway.deploys.hooks import Hooks
from gateway.deploys.logs import StoredLogs
from gateway.errors import NotFound
from gateway.events.notices import BudgetUse, NoticeChoices, Notices
from gateway.ids import day_of, now_iso
from gateway.keys import deletions_key, deploy_key, partition_tag, spend_of_deleted_key, spenders_key
from gateway.operations.leaving import WAIT_MS, Leaving
from gateway.settings import Settings
from gateway.storage import FolderStorage
from tests.fakes import FakeAppBackend
from tests.support import stores
from tests.support.accounts import Account, App
from tests.support.gateway_process import Gateway
from tests.support.key_leaks import find_keys
from tests.support.polling import wait_until
from tests.support.responses import answered, refused
from tests.support.visitor import Visitor
from tests.support.worker_process import Worker
from workers.monitors.run import make_leaving

session = pytest.mark.asyncio(loop_scope="session")
SOON = {"gateway.operations.leaving.WAIT_MS": 300, "workers.monitors.run.DELETION_SECONDS": 0.2}


def search_files(folder: Path, words: set[str]) -> list[Path]:
    paths = list(folder.rglob("*"))
    named = [path for path in paths if any(word in str(path.relative_to(folder)) for word in words)]
    return named + [p for p in paths if p.is_file() and any(word.encode() in p.read_bytes() for word in words)]


class Population:
    """An account with a record of each kind, and all words that name it."""

    def __init__(self, account: Account, app: App) -> None:
        self.account, self.app, self.words = account, app, {account.id, app.name}

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self.account.call(method, path, body)
        assert answer.status_code < 300, (path, answer.text)
        return answer.json() if answer.content else None

    async def fill(self) -> None:
        account, app, gw = self.account, self.app, self.account.gateway
        name = f"Name-{secrets.token_hex(6)}"
        await self.call("PATCH", "/account", {"name": name})
        for key in ("ci", "laptop"):
            self.words.add((await account.add_key(key, scope="read", app=app.name)).key_id)
        hook = await self.call("POST", f"/account/apps/{app.name}/hooks", {"name": "hook"})
        gw.confidential.add(hook["url"].rpartition("/")[2])
        await self.account.set_webhook("http://127.0.0.1:9/hook")
        await self.call("POST", "/account/webhook/test", {"type": "deploy.succeeded"})
        email = f"{secrets.token_hex(6)}@example.com"
        visitor = Visitor(gw)
        await visitor.join(account, email, "viewer")
        assert (await visitor.call("GET", "/account")).status_code == 200
        await visitor.log_in(account.key)
        await visitor.http.aclose()
        invited = f"{secrets.token_hex(6)}@example.com"
        await self.call("PUT", f"/account/members/{invited}", {"role": "viewer"})
        await self.call("PUT", f"/account/apps/{app.name}/env", {"NAME": "value"})
        await self.call("PUT", f"/account/apps/{app.name}/limits", {"userDailyEuro": "1"})
        headers = {"Authorization": f"Bearer {account.key}", "Content-Type": "text/html"}
        content = f"<h1>{secrets.token_hex(8)}</h1>".encode()
        published = await gw.http.put(f"/account/apps/{app.name}/source", content=content, headers=headers)
        assert published.status_code == 202, published.text
        answered(await app.ask("Hello?"))
        await account.settled()
        await gw.platform("PUT", f"accounts/{account.id}/suspension", {"reason": "once"})
        await gw.platform("DELETE", f"accounts/{account.id}/suspension")
        async with stores.opened(gw.redis.url) as store:
            notices = Notices(store)
            await notices.choose(account.id, email, NoticeChoices(budget=True))
            await notices.queue_budget(account.id, None, BudgetUse(80, 1, 1, "2026-07-02"))
        self.words |= {name, email, digest(email), hook["id"], published.json()["deployId"]}
        self.words |= {invited, digest(invited)}

    async def is_gone(self) -> bool:
        answer = await self.account.gateway.platform("GET", f"accounts/{self.account.id}")
        return answer.status_code == 404


@session
async def test_nothing_is_left(gw: Gateway, backend: FakeAppBackend, tmp_path: Path) -> None:
    leaving, staying = await gw.app(backend), await gw.app(backend)
    left, kept = Population(leaving.account, leaving), Population(staying.account, staying)
    await left.fill()
    await kept.fill()
    spent = await leaving.account.settled()
    assert spent > 0
    with gw.redis.client() as client:
        long_ago = spenders_key(day_of(int((time.time() - 300 * 86_400) * 1000)))
        client.zadd(long_ago, {"total": 5, left.account.id: 5})
        client.expire(long_ago, 600)
        before = len(find_keys(client, *kept.words, lasting=True))
        assert len(find_keys(client, *left.words)) > 20
        assert search_files(gw.data_folder, left.words)
        data = {"GATEWAY_DATA_DIR": str(gw.data_folder)}
        async with Worker(gw.redis.url, tmp_path, "monitors", confidential=gw.confidential, constants=SOON, **data):
            answer = await gw.platform("DELETE", f"accounts/{left.account.id}?now=True")  # as the command line does
            assert answer.status_code == 202, answer.text
            await wait_until(left.is_gone, 30)

            def find_rest() -> list[str]:
                rest = find_keys(client, *left.words)
                return [each for each in rest if "spend-of-deleted" not in each and "{ops}:audit:changes" not in each]

            await wait_until(
                lambda: not client.zscore(deletions_key(partition_tag(left.account.id)), left.account.id), 10
            )
            assert find_rest() == []
            assert search_files(gw.data_folder, left.words) == []
            spend = client.hgetall(spend_of_deleted_key(left.account.id))
            assert [int(nano) for nano in spend.values()] == [spent]
            assert 399 * 86_400 < client.ttl(spend_of_deleted_key(left.account.id)) <= 400 * 86_400
            assert left.app.name not in find_keys(client, *left.words)["{ops}:audit:changes"]
            assert len(find_keys(client, *kept.words, lasting=True)) >= before
    refused(await left.account.get(), 401, "UNAUTHORIZED")
    assert (await kept.account.get()).status_code == 200
    record, *_ = (await gw.platform("GET", f"audit?target={left.account.id}")).json()
    assert record["action"] == "delete_account"
    # The name is free.
    taken = await gw.account()
    assert (await taken.call("POST", "/account/apps", {"name": left.app.name})).status_code == 201


@session
async def test_the_grace(gw: Gateway, app: App) -> None:
    account = app.account

    async def ask() -> int:
        return (await app.ask("Hello?")).status_code

    name = (await account.get()).json()["name"]
    for wrong in (name.lower(), f"{name} ", "x"):
        refused(await account.call("POST", "/account/deletion", {"name": wrong}), 400, "REQUEST_MALFORMED")
    refused(await account.call("DELETE", "/account/deletion"), 404, "NOT_FOUND")
    before = await account.call("GET", f"/account/apps/{app.name}/settings")
    begun = await account.call("POST", "/account/deletion", {"name": name})
    assert begun.status_code == 202
    deletes_at = begun.json()["deletesAt"]
    assert (await account.get()).json()["deletesAt"] == deletes_at
    assert await is_suspended(app)
    await wait_until(ask, holds=lambda status: status == 403)
    refused(await account.call("POST", "/account/keys", {"name": "x"}), 403, "APP_SUSPENDED")
    refused(await gw.platform("POST", f"apps/{app.name}/deploys", {"kind": "live"}), 403, "APP_SUSPENDED")
    assert (await account.get("/account/apps")).status_code == 200
    # Lifting a suspension does not bring it back, and a second request does not prolong the grace.
    await gw.platform("PUT", f"accounts/{account.id}/suspension", {"reason": "x"})
    await gw.platform("DELETE", f"accounts/{account.id}/suspension")
    again = await account.call("POST", "/account/deletion", {"name": name})
    assert again.json()["deletesAt"] == deletes_at
    refused(await app.ask("Hello?"), 403, "APP_SUSPENDED")

    assert (await account.call("DELETE", "/account/deletion")).status_code == 204
    assert "deletesAt" not in (await account.get()).json()
    assert not await is_suspended(app)
    await wait_until(ask, holds=lambda status: status == 200)
    assert (await account.call("GET", f"/account/apps/{app.name}/settings")).json() == before.json()


async def is_suspended(app: App) -> bool:
    """Returns whether hosts serve the app no longer."""
    async with stores.opened(app.gateway.redis.url) as store:
        await (hosts := SuspendedList(store)).read_changes()
        return (app.account.id, app.name) in hosts


# -- interruptions -------------------------------------------------------------------------------------------


STEPS = ("_mark", "_revoke_keys", "_remove_apps", "_remove_deleted_data", "_remove_deploys", "_keep_spend")
STEPS += ("_remove_entries", "_remove_keys")


class Deletion:
    """The deletion of a new account."""

    def __init__(self, registry: Registry, redis_url: str, folder: Path) -> None:
        self.registry, self._url = registry, redis_url
        self.leaving = make_leaving(Settings(data_dir=str(folder)), registry)

    async def create_account(self) -> str:
        self.account, _ = await self.registry.create_account("Leaving", "free")
        return self.account.id

    async def begin(self) -> str:
        await self.leaving.begin(await self.create_account(), now=True)
        return self.account.id

    async def go_on(self) -> int:
        """Goes on without waiting until the account is due again. Returns how many accounts are deleted."""
        key = deletions_key(partition_tag(self.account.id))
        await self.registry.store.client.zadd(key, {self.account.id: 0}, xx=True)
        return await self.leaving.delete_due()

    async def finish(self) -> None:
        for _ in range(5):
            if await self.go_on():
                return
        raise AssertionError("the deletion does not end")

    def find_rest(self, *words: str) -> list[str]:
        words = (self.account.id, "Leaving", *words)
        with redis.Redis.from_url(self._url) as client:
            return [*find_keys(client, *words, *(digest(word) for word in words))]


@pytest.fixture
def deletion(store: Any, redis_url: str, tmp_path: Path) -> Deletion:
    return Deletion(Registry(store, Vault("")), redis_url, tmp_path)


async def test_without_a_grace(deletion: Deletion, tmp_path: Path) -> None:
    """`GATEWAY_ACCOUNT_GRACE=0` deletes at once, when each process has had the time to read that the account stops."""
    deletion.leaving = make_leaving(Settings(data_dir=str(tmp_path), account_grace=0), deletion.registry)
    account, began = await deletion.create_account(), time.time()
    assert await deletion.leaving.begin(account) <= now_iso()
    due = await deletion.registry.store.client.zscore(deletions_key(partition_tag(account)), account)
    assert due >= int(began * 1000) + WAIT_MS
    await deletion.finish()
    assert await deletion.registry.account(account) is None


@pytest.mark.parametrize("step", STEPS)
async def test_an_interrupted_deletion_is_continued(
    deletion: Deletion, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    account, registry = await deletion.create_account(), deletion.registry
    await registry.put_app(AppRecord(id="app-1", name="notes", account=account, createdAt=""), None)
    await registry.members.put(account, "ada@example.com", "owner")
    await registry.members.set_role(account, "bob@example.com", "viewer", "ada@example.com")
    await Hooks(Settings(), registry).create(account, "notes", "hook")
    await deletion.leaving.begin(account, now=True)
    original = getattr(Leaving, step)

    async def die(self: Leaving, *args: Any) -> None:
        await original(self, *args)
        raise asyncio.CancelledError

    with monkeypatch.context() as dying:
        dying.setattr(Leaving, step, die)
        with pytest.raises(asyncio.CancelledError):
            await deletion.go_on()
    await deletion.finish()
    assert deletion.find_rest("app-1", "notes", "ada@example.com", "bob@example.com") == []


async def test_deploys_that_are_not_listed_any_more_are_removed(store: Any, deletion: Deletion, tmp_path: Path) -> None:
    """An account's list has its newest deploys alone."""
    account_id = await deletion.begin()
    ids, day = ("dep_own", "dep_other"), now_iso()[:10]
    for deploy_id, account in zip(ids, (account_id, "acc_other"), strict=True):
        record = {"id": deploy_id, "account": account, "app": "notes", "appId": "app-1", "kind": "live"}
        record |= {"state": "live", "trigger": "upload", "createdAt": f"{day}T10:00:00.000Z"}
        await store.client.hset(deploy_key(account_id, deploy_id), mapping=record)
        await store.client.expire(deploy_key(account_id, deploy_id), 600)
        await StoredLogs(FolderStorage(tmp_path)).write(deploy_id, day, "built\n")
    await deletion.finish()
    assert [await store.client.exists(deploy_key(account_id, deploy_id)) for deploy_id in ids] == [0, 1]
    assert [file.name for file in (tmp_path / "logs").rglob("*.gz")] == ["dep_other.gz"]


# -- writes while it ends ------------------------------------------------------------------------------------


LATE = "late@example.com"
WRITES: dict[str, Callable[[Registry, str], Awaitable[Any]]] = {
    "an app": lambda registry, account: registry.put_app(
        AppRecord(id="app-2", name="late", account=account, createdAt=""), None
    ),
    "a member": lambda registry, account: registry.members.put(account, LATE, "owner"),
    "an invitation": lambda registry, account: registry.members.set_role(account, LATE, "owner", "API key"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("has_record", [True, False], ids=["while it goes", "when it is gone"])
async def test_a_write_of_an_account_that_is_gone_leaves_nothing(
    deletion: Deletion, write: Any, has_record: bool
) -> None:
    account_id = await deletion.begin()
    await (deletion.leaving._mark(account_id) if has_record else deletion.finish())
    with pytest.raises(NotFound):
        await write(deletion.registry, account_id)
    if has_record:
        await deletion.finish()
    assert deletion.find_rest("app-2", "late", LATE) == []
