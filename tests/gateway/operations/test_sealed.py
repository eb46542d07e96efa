"""Sealed values: all of them are found, opened, and sealed with another key."""

import msgspec
import pytest
from structlog.testing import capture_logs

from gateway.accounts.records import App, ReplacedFields, Repository, SecretAuth
from gateway.accounts.registry import Registry
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.deploys.environment import Environments
from gateway.deploys.manifest import Manifest
from gateway.deploys.release import Release
from gateway.deploys.serving import Wanted
from gateway.events.webhooks import Receiver, Webhooks
from gateway.ids import now_iso
from gateway.keys import deploy_key, environment_key, kind_of, previous_secret_key, serving_key, webhook_key
from gateway.operations.sealed import SEALED, SealedCounts, count_sealed, find_unopened, reseal_all
from gateway.redis.client import Store

OLD, NEW, OTHER = "an-old-encryption-key-of-32-chars", "a-new-encryption-key-of-32-chars", "no-encryption-key-of-it"
OF_OLD, OF_NEW = (Vault(key).fingerprints()[0] for key in (OLD, NEW))
VALUES = 10  # that are in use, of the app below


def as_json(record: object) -> str:
    return msgspec.json.encode(record).decode()


async def fill(store: Store, vault: Vault, name: str = "shop") -> App:
    """Makes an account whose app has a sealed value in each place."""
    registry = Registry(store, vault)
    account, _ = await registry.create_account("A", "maker")
    app = App(
        id=name,
        name=name,
        account=account.id,
        auth=SecretAuth(vault.seal("auth")),
        repository=Repository("https://example.com/a.git", credentials=vault.seal("ana:password")),
        replaced=ReplacedFields("dep_2", auth=SecretAuth(vault.seal("former auth"))),
        createdAt=now_iso(),
    )
    app = await registry.put_app(app, None)
    await Environments(store, vault).change_variables(app, {"COLOR": "red", "SIZE": "large"})
    await Environments(store, vault).change_variables(app, {"COLOR": "blue", "SIZE": False}, "preview")
    webhooks = Webhooks(store, vault, allow_private=True)
    await webhooks.set_receiver(account.id, "http://127.0.0.1:9/")
    await webhooks.rotate_secret(account.id)
    manifest = as_json(Manifest(auth=SecretAuth(vault.seal("of the manifest"))))
    releases = {
        "dep_1": Release("digest", 7, True, vault.seal('{"COLOR":"green"}'), manifest),
        "dep_2": Release("digest", 7, True, vault.seal('{"COLOR":"red"}')),
    }
    wanted = Wanted(account.id, app.id, "live", "live", "dep_2", "dep_1", releases)
    await store.client.hset(serving_key(account.id, app.id), "live", as_json(wanted))
    await store.client.hset(deploy_key(account.id, "dep_2"), "state", "live")
    await store.client.expire(deploy_key(account.id, "dep_2"), 86_400)
    return app


async def read_wanted(store: Store, app: App) -> Wanted:
    return msgspec.json.decode(await store.client.hget(serving_key(app.account, app.id), "live"), type=Wanted)


async def test_all_are_counted_under_their_key(store: Store) -> None:
    app = await fill(store, Vault(OLD))
    await Environments(store, Vault(f"{NEW},{OLD}")).change_variables(app, {"SIZE": "small"})
    assert await count_sealed(store, Vault(f"{NEW},{OLD}")) == SealedCounts({OF_NEW: 1, OF_OLD: VALUES - 1}, {})
    for keys in (OTHER, ""):
        counts = await count_sealed(store, Vault(keys))
        assert (sum(counts.keys.values()), counts.total) == (0, VALUES)
        assert {kind_of(key) for key in counts.unopened} == SEALED.keys()
    counts = await count_sealed(store, Vault(NEW))
    assert counts.keys == {OF_NEW: 1}
    assert counts.unopened[environment_key(app.account, app.id)] == 1


async def test_all_are_sealed_with_the_first_key(store: Store) -> None:
    app, both, new = await fill(store, Vault(OLD)), Vault(f"{NEW},{OLD}"), Vault(NEW)
    before, ends = await read_wanted(store, app), await store.client.pexpiretime(previous_secret_key(app.account))
    assert await reseal_all(store, both) == VALUES
    assert await count_sealed(store, both) == SealedCounts({OF_NEW: VALUES, OF_OLD: 0}, {})
    assert await reseal_all(store, both) == 0
    assert await Environments(store, new).open_variables(app) == {"COLOR": "red", "SIZE": "large"}
    assert await Environments(store, new).open_variables(app, "preview") == {"COLOR": "blue"}
    found = await Registry(store, new).find_app(app.id)
    assert found is not None
    assert found.repository is not None
    assert found.replaced is not None
    assert found.repository.clone_url(new) == "https://ana:password@example.com/a.git"
    assert [new.open(auth.secret) for auth in (found.auth, found.replaced.auth) if isinstance(auth, SecretAuth)] == [
        "auth",
        "former auth",
    ]
    receiver = msgspec.json.decode(await store.get(webhook_key(app.account)) or "", type=Receiver)
    assert new.open(receiver.secret).startswith("whsec_")
    assert new.open(await store.get(previous_secret_key(app.account)) or "").startswith("whsec_")
    assert abs(await store.client.pexpiretime(previous_secret_key(app.account)) - ends) < 2_000
    wanted = await read_wanted(store, app)
    assert new.open(wanted.releases["dep_2"].environment) == '{"COLOR":"red"}'
    manifest = msgspec.json.decode(wanted.releases["dep_1"].manifest, type=Manifest)
    assert isinstance(manifest.auth, SecretAuth)
    assert new.open(manifest.auth.secret) == "of the manifest"
    with pytest.raises(NoEncryptionKey):  # a rollback seals the present variables
        new.open(wanted.releases["dep_1"].environment)
    assert wanted.token != before.token  # so the host takes the step again, and with it the variables


async def test_a_process_says_once_that_its_key_is_the_wrong_one(store: Store) -> None:
    await fill(store, Vault(OLD))
    with capture_logs() as lines:
        assert await find_unopened(store, Vault(f"{NEW},{OLD}")) == ""
    assert lines == []
    for key in (NEW, ""):
        with capture_logs() as lines:
            said = await find_unopened(store, Vault(key))
        assert said == f"GATEWAY_ENCRYPTION_KEY opens 0 of {VALUES} stored secrets."
        assert [line["event"] for line in lines] == ["secrets.unopened"]
