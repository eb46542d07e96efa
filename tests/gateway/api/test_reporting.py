"""An external engine lists the queued deploys."""

import secrets

import pytest

from tests.support.accounts import Account
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def queued_of(gw: Gateway, account: Account, url: str) -> str:
    name = f"app-{secrets.token_hex(4)}"
    record = {"account": account.id, "repository": {"url": url}}
    assert (await gw.platform("PUT", f"apps/{name}", record)).is_success
    deploy: str = (await gw.platform("POST", f"apps/{name}/deploys", {"kind": "live"})).json()["deployId"]
    return deploy


async def test_one_unreadable_password_hides_no_other_deploy(building: Gateway) -> None:
    gw = building
    account = await gw.account("max")
    password = secrets.token_hex(12)
    gw.confidential.add(password)
    broken = await queued_of(gw, account, f"https://user:{password}@git.example/one.git")
    good = await queued_of(gw, account, f"https://user:{password}@git.example/two.git")
    with gw.redis.client() as client:
        [key] = [key for key in client.scan_iter("app:*") if b"one.git" in client.get(key)]
        record = client.get(key).decode()
        sealed = record.partition('"credentials":"')[2].partition('"')[0]
        client.set(key, record.replace(sealed, sealed[:-8] + "AAAAAAA="))
        client.publish("changes", key)
    answer = await gw.platform("GET", "deploys?state=queued")
    assert answer.status_code == 200, answer.text
    listed = {deploy["id"]: deploy for deploy in answer.json()}
    assert listed[good]["repository"]["url"] == f"https://user:{password}@git.example/two.git"
    assert "problem" not in listed[good]
    assert listed[broken]["repository"]["url"] == "https://git.example/one.git"
    assert "cannot be decrypted" in listed[broken]["problem"]
