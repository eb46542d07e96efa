"""`capsule secrets`, as an operator runs it while a key is replaced."""

import asyncio
import json

from gateway.accounts.records import App
from gateway.accounts.vault import Vault
from gateway.deploys.environment import Environments
from gateway.redis.client import Store
from tests.support.command_line import Run, invoke
from tests.support.redis_servers import free_port

OLD, NEW = "an-old-encryption-key-of-32-characters", "a-new-encryption-key-of-32-characters"


async def capsule(url: str, key: str, *arguments: str) -> Run:
    environment = {"GATEWAY_REDIS_URL": url, "GATEWAY_ENCRYPTION_KEY": key}
    return await asyncio.to_thread(invoke, ["secrets", *arguments], environment)


async def test_a_key_is_replaced(redis_url: str, store: Store) -> None:
    app = App(id="shop", name="shop", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")
    await Environments(store, Vault(OLD)).change_variables(app, {"A": "1", "B": "2"})
    [old], [new] = Vault(OLD).fingerprints(), Vault(NEW).fingerprints()
    [record] = await store.list_keys()
    code, out, _ = await capsule(redis_url, NEW, "check", "--json")
    none = {"key": "", "use": "none", "secrets": 2, "record": record}
    assert (code, json.loads(out)) == (1, [{"key": new, "use": "encrypts", "secrets": 0, "record": ""}, none])
    code, out, error = await capsule(redis_url, NEW, "reencrypt")
    assert (code, out) == (1, "Encrypted 0 of 2 secrets again.\n")
    assert error == "No key opens 2 of them: capsule secrets check names them\n"
    assert await capsule(redis_url, f"{NEW},{OLD}", "reencrypt") == (0, "Encrypted 2 of 2 secrets again.\n", "")
    code, out, _ = await capsule(redis_url, f"{NEW},{OLD}", "check")
    assert (code, [line.split() for line in out.splitlines()[1:]]) == (
        0,
        [[new, "encrypts", "2"], [old, "decrypts", "0"]],
    )
    assert await Environments(store, Vault(NEW)).open_variables(app) == {"A": "1", "B": "2"}


async def test_what_it_refuses(redis_url: str) -> None:
    assert await capsule(redis_url, "", "reencrypt") == (1, "", "capsule: GATEWAY_ENCRYPTION_KEY is not set\n")
    empty = "GATEWAY_ENCRYPTION_KEY is not set, and no secrets are stored.\n"
    code, out, error = await capsule(redis_url, "", "check")
    assert (code, out + error) == (0, empty)
    code, _, error = await capsule(f"redis://127.0.0.1:{free_port()}", NEW, "check")
    assert (code, error) == (1, "capsule: Redis: Redis is not running\n")
