"""Environment variables over HTTP: which are listed, refused and kept."""

import secrets

import pytest

from gateway.accounts.records import App
from gateway.accounts.vault import Vault
from gateway.deploys.environment import Environments
from gateway.redis.client import Store
from tests.support.accounts import Account
from tests.support.deploys import an_app
from tests.support.gateway_process import Gateway
from tests.support.processes import ENCRYPTION_KEY

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def names(account: Account, app: str) -> list[str]:
    return [each["name"] for each in (await account.call("GET", f"/account/apps/{app}/env")).json()]


async def test_names_are_shown_and_values_never(gw: Gateway, account: Account, app: str) -> None:
    value = secrets.token_hex(20)
    gw.confidential.add(value)
    path = f"/account/apps/{app}/env"
    assert (await account.call("GET", path)).json() == []
    put = await account.call("PUT", path, {"TOKEN": value, "_B2": "", "A": "ä\n"})
    assert put.status_code == 200
    assert [each["name"] for each in put.json()] == ["A", "TOKEN", "_B2"]
    assert all(each.keys() == {"name", "updatedAt"} for each in put.json())
    assert value not in put.text
    put = await account.call("PUT", path, {"A": None, "UNKNOWN": None, "C": "1"})
    assert [each["name"] for each in put.json()] == ["C", "TOKEN", "_B2"]
    with gw.redis.client() as client:
        [key] = client.keys("*:environment:*")
        assert value.encode() not in client.get(key)


RESERVED = ("GATEWAY_X", "PORT", "VITE_SERVICE_AI_URL", "PATH", "LD_PRELOAD", "GLIBC_TUNABLES")


async def test_names_that_are_refused(account: Account, app: str) -> None:
    for name in ("lower", "1A", "A-B", "", "A B", "É", "A\n", *RESERVED):
        answer = await account.call("PUT", f"/account/apps/{app}/env", {"GOOD": "x", name: "the value"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "REQUEST_MALFORMED"), name
        assert "the value" not in answer.text
    assert await names(account, app) == []


async def test_bodies_that_are_refused(account: Account, app: str) -> None:
    path = f"/account/apps/{app}/env"
    for body in ([], {"A": {"b": "c"}}, {"A": "nul\0"}, {"A": "x" * 65_536}):
        answer = await account.call("PUT", path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "REQUEST_MALFORMED"), body
    wrong = await account.call("PUT", path, {"GOOD": "x", "BAD": 5})
    assert wrong.json()["error"]["message"] == "BAD: must be text or null, not a whole number."
    for size in (65_535, 32_000):
        assert (await account.call("PUT", path, {"A": "x" * size})).is_success
    assert (await account.call("PUT", path, {"B": "x" * 33_600})).status_code == 400
    assert (await account.call("PUT", path, {"A": None, "B": "x" * 33_600})).is_success
    assert (await account.call("PUT", path, {f"V{n}": "x" for n in range(500)})).status_code == 400
    assert await names(account, app) == ["B"]


async def test_previews_have_other_values_or_none(gw: Gateway, account: Account, app: str, store: Store) -> None:
    value = secrets.token_hex(20)
    gw.confidential.add(value)
    path = f"/account/apps/{app}/env"
    previews = path + "?kind=preview"
    await account.call("PUT", path, {"SAME": "1", "DATABASE": "live", "PAYMENTS": "live"})
    live = (await account.call("GET", path)).json()
    put = await account.call("PUT", previews, {"DATABASE": value, "PAYMENTS": False, "ONLY": ""})
    assert put.status_code == 200, put.text
    expected = {"DATABASE": "other", "ONLY": "other", "PAYMENTS": "none", "SAME": "same"}
    assert {each["name"]: each["inPreviews"] for each in put.json()} == expected
    assert (await account.call("GET", previews)).json() == put.json()
    assert (await account.call("GET", path)).json() == live, "clients that know of no previews see what they saw"
    record = App(id=app, name=app, account=account.id, createdAt="")
    environments = Environments(store, Vault(ENCRYPTION_KEY))
    assert await environments.open_variables(record) == {"SAME": "1", "DATABASE": "live", "PAYMENTS": "live"}
    assert await environments.open_variables(record, "preview") == {"SAME": "1", "DATABASE": value, "ONLY": ""}
    with gw.redis.client() as client:
        [stored] = client.keys("*:preview-environment:*")
        assert value.encode() not in client.get(stored)
    put = await account.call("PUT", previews, {"DATABASE": None, "PAYMENTS": None, "ONLY": None})
    assert {each["inPreviews"] for each in put.json()} == {"same"}
    assert await environments.open_variables(record, "preview") == await environments.open_variables(record)
    file = await account.call("PUT", previews, content=b"DATABASE=other\n", headers={"Content-Type": "text/plain"})
    assert file.status_code == 200, file.text
    assert (await environments.open_variables(record, "preview"))["DATABASE"] == "other"
    for refused, body in ((path, {"A": False}), (previews, {"A": True}), (previews, {"PORT": False})):
        answer = await account.call("PUT", refused, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "REQUEST_MALFORMED"), body
    assert (await account.call("GET", path + "?kind=both")).status_code == 400


async def test_another_account_inherits_no_variables(gw: Gateway, account: Account) -> None:
    other = await gw.account()
    for change in ("delete", "move"):
        app = await an_app(account)
        await account.call("PUT", f"/account/apps/{app}/env", {"TOKEN": "x"})
        await account.call("PUT", f"/account/apps/{app}/env?kind=preview", {"TOKEN": "y"})
        if change == "delete":
            await gw.platform("DELETE", f"apps/{app}")
        await gw.platform("PUT", f"apps/{app}", {"account": other.id})
        assert await names(other, app) == []
        await gw.platform("PUT", f"apps/{app}", {"account": account.id})
        assert await names(account, app) == []
    with gw.redis.client() as client:
        assert client.keys("*environment:*") == []
