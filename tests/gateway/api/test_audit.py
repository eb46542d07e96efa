"""Every change by an operator is recorded, whichever route makes it, and no record contains a secret."""

import re
import secrets
from typing import Any

import httpx
import pytest
from litestar.routes import HTTPRoute

from gateway.app import create_app
from gateway.settings import Settings
from tests.gateway.conftest import Launch
from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAMED = {name: f"{name}-{secrets.token_hex(16)}" for name in ("ana", "bob")}


def writing_routes() -> list[tuple[str, str]]:
    routes = [route for route in create_app(Settings()).litestar.routes if isinstance(route, HTTPRoute)]
    platform = [route for route in routes if route.path.startswith("/platform")]
    return sorted((method, r.path_format) for r in platform for method in r.methods - {"GET", "HEAD", "OPTIONS"})


async def trail(gw: Gateway, name: str = "changes", **query: Any) -> list[dict[str, Any]]:
    parameters = "".join(f"&{key}={value}" for key, value in query.items())
    answer = await gw.platform("GET", f"audit?trail={name}{parameters}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_every_writing_route_is_recorded(gw: Gateway) -> None:
    """Attempts are recorded, too: these names do not exist, or the body is invalid."""
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    assert len(writing_routes()) >= 12
    for method, path in writing_routes():
        target = f"nothing-{secrets.token_hex(4)}"
        answer = await gw.http.request(method, re.sub(r"{\w+}", target, path), headers=headers, json={"no": "field"})
        found = [r for name in ("changes", "reports") for r in await trail(gw, name, limit=1)]
        (record,) = [r for r in found if r["requestId"] == answer.headers["X-Request-Id"]]
        code = answer.json()["error"]["code"] if answer.status_code >= 400 else ""
        expected = (target if "{" in path else "", answer.status_code, code, "operator")
        assert tuple(record[name] for name in ("target", "status", "code", "operator")) == expected, path


async def test_a_record_names_operator_action_target_and_outcome(launch: Launch) -> None:
    named = ",".join(f"{name}={token}" for name, token in NAMED.items())
    async with launch(GATEWAY_OPERATOR_TOKENS=named) as gw:
        gw.confidential |= {*NAMED.values()}

        async def by(name: str, method: str, path: str, body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {NAMED[name]}"}
            return await gw.http.request(method, f"/platform/{path}", json=body, headers=headers)

        made = (await by("ana", "POST", "accounts", {"name": "Vreni", "plan": "free"})).json()
        gw.confidential.add(made["apiKey"])
        await by("bob", "PATCH", f"accounts/{made['id']}", {"plan": "maker"})
        password, secret = secrets.token_hex(12), secrets.token_hex(20)
        gw.confidential |= {password, secret}
        app = {
            "account": made["id"],
            "auth": {"kind": "secret", "secret": secret},
            "repository": {"url": f"https://ana:{password}@git.example/x.git"},
        }
        await by("ana", "PUT", "apps/vrenis-shop", app)
        refused(await by("bob", "PATCH", "accounts/acc_nobody", {"plan": "free"}), 404, "NOT_FOUND")
        await gw.switch(enabled=False)
        records = list(reversed(await trail(gw)))
        withheld = {"auth": "(not recorded)", "repository": "(not recorded)"}
        assert [(r["operator"], r["action"], r["target"], r["details"], r["status"], r["code"]) for r in records] == [
            ("ana", "create_account", made["id"], {"name": "Vreni"}, 201, ""),
            ("bob", "change_account", made["id"], {"plan": "maker", "plan before": "free"}, 200, ""),
            ("ana", "put_app", "vrenis-shop", {"account": made["id"], **withheld}, 200, ""),
            ("bob", "change_account", "acc_nobody", {"plan": "free"}, 404, "NOT_FOUND"),
            ("operator", "switch_inference", "", {"enabled": False, "enabled before": True}, 200, ""),
        ]
        fingerprints = {r["operator"]: r["token"] for r in records}
        assert len({*fingerprints.values()}) == 3
        assert all(re.fullmatch(r"[0-9a-f]{8}", each) for each in fingerprints.values())
        first, second = await trail(gw, limit=2), await trail(gw, limit=2, before=records[3]["id"])
        assert [r["id"] for r in first + second] == [r["id"] for r in reversed(records[1:])]
        with gw.redis.client() as client:
            assert 0 < client.ttl("{ops}:audit:changes") <= 400 * 86_400
            client.delete("{ops}:audit:changes")
            client.set("{ops}:audit:changes", "not a stream", ex=60)
        # A change that cannot be recorded is refused.
        refused(await by("bob", "PATCH", f"accounts/{made['id']}", {"plan": "max"}), 503, "BACKBONE_UNAVAILABLE")
        assert (await gw.platform("GET", f"accounts/{made['id']}")).json()["plan"] == "maker"


async def test_requests_without_an_operator_are_not_recorded(gw: Gateway) -> None:
    before = await trail(gw, limit=1)
    answer = await gw.http.put("/platform/inference", headers={"X-Reason": "x"}, json={"enabled": False})
    refused(answer, 401, "UNAUTHORIZED")
    refused(await gw.http.get("/platform/audit"), 401, "UNAUTHORIZED")
    assert await trail(gw, limit=1) == before


async def with_reason(gw: Gateway, *reasons: str, path: str = "inference", method: str = "PUT") -> httpx.Response:
    headers = [("Authorization", f"Bearer {OPERATOR}"), *(("X-Reason", reason) for reason in reasons)]
    return await gw.http.request(method, f"/platform/{path}", headers=headers, json={"enabled": True})


async def test_a_reason_is_recorded(gw: Gateway) -> None:
    """One that is invalid refuses the change."""
    for header, reason in (
        ("Load test is over", "Load test is over"),
        ("%C3%9Cberlastung%3A%20100%25", "Überlastung: 100%"),
        ("%C3%A9" * 500, "é" * 500),
    ):
        answer = await with_reason(gw, header)
        assert answer.status_code == 200, answer.text
        (record, *_) = await trail(gw)
        assert (record["requestId"], record["reason"]) == (answer.headers["X-Request-Id"], reason)
    for invalid in (
        [""],
        ["%C3%A9" * 501],
        ["two%0Alines"],
        ["%E2%80%AEbackwards"],  # another direction
        ["%FF"],
        ["one", "two"],
        *([f"leaked {secret}"] for secret in ("csk_abcdefghijklmnop", "whsec_abcdefgh", OPERATOR)),
        ["https://api.example.com/hooks/deploy/abc"],
    ):
        answer = await with_reason(gw, *invalid, path="apps/nobody-has-this", method="DELETE")
        refused(answer, 400, "REQUEST_MALFORMED")
        (record, *_) = await trail(gw)
        assert record["requestId"] == answer.headers["X-Request-Id"]
        assert (record["reason"], record["code"]) == ("", "REQUEST_MALFORMED")


async def test_records_are_chosen(gw: Gateway) -> None:
    account = await gw.account()
    for plan in ("maker", "free", "max"):
        await gw.platform("PATCH", f"accounts/{account.id}", {"plan": plan})
    changes = await trail(gw, action="change_account", target=account.id)
    assert [record["details"]["plan"] for record in changes] == ["max", "free", "maker"]
    assert await trail(gw, operator="nobody") == []
    assert len(await trail(gw, operator="operator", limit=3)) == 3
    # Reports of machines have a trail of their own.
    await gw.platform("POST", "apps/no-such-app/crashes", {"reason": "oom"})
    record = (await trail(gw, "reports"))[0]
    assert (record["action"], record["target"], record["details"]) == ("report_crash", "no-such-app", {"reason": "oom"})
    assert not [r for r in await trail(gw) if r["requestId"] == record["requestId"]]
    wrong = ("limit=0", "limit=201", "before=x", "before=0-0", "before=1-1%0A", "trail=other")
    for query in (*wrong, f"target={'x' * 201}"):
        refused(await gw.platform("GET", f"audit?{query}"), 400, "REQUEST_MALFORMED")
