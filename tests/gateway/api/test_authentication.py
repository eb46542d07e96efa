"""The credential is checked before everything else, so a request without one reveals nothing."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from itertools import cycle
from typing import Any

import httpx
import pytest

from gateway.accounts.access import TOOL_CALLS
from gateway.accounts.pacing import MAX_BODIES
from gateway.accounts.sessions import ACCOUNT, OPERATOR
from tests.fakes import FakeAppBackend
from tests.support.accounts import Account, App
from tests.support.gateway_process import OPERATOR as TOKEN
from tests.support.gateway_process import Gateway
from tests.support.operations import list_operations
from tests.support.raw_http import error_of, read_reply, request
from tests.support.responses import refused
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Bodies that cannot be parsed, have an unknown field or a wrong type, or are too large.
BODIES: dict[str, dict[str, Any]] = {
    "none": {},
    "not JSON": {"content": b"{", "headers": {"Content-Type": "application/json"}},
    "not UTF-8": {"content": b"\xff\xfe", "headers": {"Content-Type": "application/json"}},
    "nested deeply": {"content": b"[" * 50_000, "headers": {"Content-Type": "application/json"}},
    "an unknown field": {"json": {"surprise": 1}},
    "another type": {"content": b"<a/>", "headers": {"Content-Type": "text/xml"}},
    "a form without a boundary": {"content": b"x", "headers": {"Content-Type": "multipart/form-data"}},
    "too large": {"content": b" " * 1_100_000, "headers": {"Content-Type": "application/json"}},
    "no number": {"params": {"limit": "x", "state": "x"}},
}


WRONG = ["", "Bearer", "Bearer " + "x" * 5_000, f"Basic {TOKEN}", TOKEN]
WRONG += [f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer csk_nobody"]


async def test_an_invalid_body_without_a_credential_gets_401(gw: Gateway) -> None:
    """Each operation with the credentials of others, and with some of the wrong ones and of the bodies in turn."""
    paths = {path for _, path, _ in list_operations()}
    assert paths >= {"/account/webhook/test", "/account/apps/x/source", "/platform/apps/x/findings"}
    credentials = {"operatorToken": TOKEN, "apiKey": (await gw.account()).key}
    wrong, bodies = cycle(WRONG), cycle(BODIES.values())
    for method, path, accepted in list_operations():
        others = [f"Bearer {credential}" for kind, credential in credentials.items() if kind not in accepted]
        for authorization in (*others, "Bearer csk_nobody", next(wrong), next(wrong)):
            body = next(bodies)
            headers = {**body.get("headers", {}), **({"Authorization": authorization} if authorization else {})}
            try:
                response = await gw.http.request(method, path, **{**body, "headers": headers})
            except httpx.WriteError:
                continue  # the response arrived and the connection closed before the whole body was sent
            refused(response, 401, "UNAUTHORIZED")
            assert response.headers["WWW-Authenticate"] == "Bearer", (method, path, authorization)


async def test_an_invalid_body_from_another_site_gets_403(gw: Gateway, visitor: Visitor) -> None:
    """The origin of a session's request is checked before the body, too."""
    await visitor.log_in((await gw.account()).key)
    await visitor.log_in_as_operator()
    foreign = {"Origin": "http://demo.apps.localhost", "Content-Type": "application/json"}
    tried = [(method, path) for method, path, _ in list_operations() if method != "GET"]
    assert {path.split("/")[1] for _, path in tried} >= {"account", "platform"}
    for method, path in tried:
        refused(await visitor.http.request(method, path, content=b"{", headers=foreign), 403, "CSRF_REFUSED")


# -- a caller that loses its right finishes nothing: its requests are refused, and its streams end ---------------


ENDS_SECONDS = 2.0  # that a stream may take to end, as the documentation says
BODY = b'{"name": "late"}'
PACKED = "Content-Type: application/gzip"  # of a source


class Held:
    """A request whose body lacks its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rest: bytes) -> None:
        self._reader, self._writer, self._rest = reader, writer, rest

    @classmethod
    async def open(cls, gw: Gateway, method: str, path: str, *headers: str, body: bytes = BODY) -> "Held":
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.port)
        host = f"Host: 127.0.0.1:{gw.port}"
        whole = request(path, body, *headers, method=method).replace(b"Host: gateway", host.encode())
        writer.write(whole[:-1])
        await writer.drain()
        return cls(reader, writer, whole[-1:])

    async def finish(self) -> tuple[int, str]:
        with contextlib.suppress(ConnectionError):
            self._writer.write(self._rest)
        reply = await asyncio.wait_for(read_reply(self._reader), 30)
        self.close()
        return error_of(reply)

    def close(self) -> None:
        self._writer.close()


async def revoke(account: Account, other: Account) -> None:
    assert (await account.call("DELETE", f"/account/keys/{other.key_id}")).status_code == 204


def bearer(account: Account) -> str:
    return f"Authorization: Bearer {account.key}"


# -- requests --------------------------------------------------------------------------------------------------


async def test_a_revoked_key_finishes_nothing(gw: Gateway, app: App) -> None:
    """Neither a change nor a call of a tool. The bodies of many requests are held at once."""
    calls = [(*call, BODY) for call in list_changes("apiKey", app)]
    accepted = ["Accept: application/json, text/event-stream"]
    calls += [("POST", "/mcp", accepted, body) for body in write_tool_calls(app)]
    for some in batched(calls):
        other = await app.account.add_key()
        held = [await Held.open(gw, method, path, bearer(other), *more, body=body) for method, path, more, body in some]
        await asyncio.sleep(0.5)
        await revoke(app.account, other)
        for each, (method, path, *_) in zip(held, some, strict=True):
            assert await each.finish() == (401, "UNAUTHORIZED"), (method, path)
        actions = {entry["action"] for entry in (await app.account.get("/account/audit")).json()}
        assert actions <= {"create_key", "revoke_key", "put_app", "create_account"}, "a refused request is in no trail"


def write_tool_calls(app: App) -> Iterator[bytes]:
    for action in (name for name, calls in TOOL_CALLS.items() if any(each.changes for each in calls)):
        tool, _, name = action.partition(" ")
        arguments = {"app": app.name, "name": "late", **({"action": name} if name else {})}
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
        yield json.dumps(call).encode()


def batched(calls: list[Any]) -> list[list[Any]]:
    """Returns as many at a time as a caller may send at once."""
    return [calls[start : start + MAX_BODIES] for start in range(0, len(calls), MAX_BODIES)]


def list_changes(credential: str, app: App) -> list[tuple[str, str, list[str]]]:
    """Returns method, path and headers of each."""
    return [
        (method, path.replace("/apps/x", f"/apps/{app.name}"), [PACKED] if path.endswith("/source") else [])
        for method, path, kinds in list_operations()
        if method != "GET" and credential in kinds
    ]


async def test_an_operator_who_logged_out_finishes_no_change(gw: Gateway, app: App, visitor: Visitor) -> None:
    for some in batched(list_changes("operatorToken", app)):
        await visitor.log_in_as_operator()
        headers = f"Cookie: {OPERATOR}={visitor.http.cookies[OPERATOR]}", f"Origin: {gw.address}"
        held = [await Held.open(gw, method, path, *headers, *more) for method, path, more in some]
        await asyncio.sleep(0.5)
        assert (await visitor.call("DELETE", "/ops/session")).status_code == 204
        for each, call in zip(held, some, strict=True):
            assert await each.finish() == (401, "UNAUTHORIZED"), call


@contextlib.asynccontextmanager
async def signed_in(account: Account, email: str, role: str) -> AsyncIterator[Visitor]:
    visitor = Visitor(account.gateway)
    async with visitor.http:
        await visitor.join(account, "chief@example.com", "owner")  # the last owner cannot go
        await visitor.join(account, email, role)
        yield visitor


async def hold(visitor: Visitor, method: str, path: str, body: dict[str, Any]) -> Held:
    headers = (f"Cookie: {ACCOUNT}={visitor.token}", f"Origin: {visitor.gw.address}")
    held = await Held.open(visitor.gw, method, path, *headers, body=json.dumps(body).encode())
    await asyncio.sleep(0.2)
    return held


async def test_a_demoted_owner_creates_no_key_and_a_removed_one_does_not_come_back(gw: Gateway) -> None:
    account = await gw.account()
    async with signed_in(account, "mallory@example.com", "owner") as mallory:
        member = "/account/members/mallory@example.com"
        held = await hold(mallory, "POST", "/account/keys", {"name": "late"})
        assert (await account.call("PUT", member, {"role": "viewer"})).status_code == 200
        assert await held.finish() == (403, "NOT_PERMITTED")
        assert (await account.call("PUT", member, {"role": "owner"})).status_code == 200
        held = await hold(mallory, "PUT", member, {"role": "owner"})
        assert (await account.call("DELETE", member)).status_code == 204
        assert await held.finish() == (401, "UNAUTHORIZED")
        assert len((await account.get("/account/keys")).json()) == 1
        assert [each["email"] for each in (await account.get("/account/members")).json()] == ["chief@example.com"]


async def test_a_session_that_moves_to_another_account_takes_no_right_along(gw: Gateway, app: App) -> None:
    """Its uploads and streams stay those of the account in which they began."""
    account, own = app.account, await gw.account()
    async with signed_in(account, "mallory@example.com", "developer") as mallory:
        cookie, token = f"Cookie: {ACCOUNT}={mallory.token}", mallory.token
        invited = await own.call("PUT", "/account/members/mallory@example.com", {"role": "owner"})
        assert invited.status_code == 200
        async with following(gw, "/account/changes", Cookie=f"{ACCOUNT}={token}") as measure:
            origin = f"Origin: {gw.address}"
            path = f"/account/apps/{app.name}/source"
            held = await Held.open(gw, "PUT", path, cookie, origin, PACKED)
            await asyncio.sleep(0.2)
            assert (await mallory.call("PUT", f"/dashboard/session/invitations/{own.id}")).status_code == 200
            assert (await mallory.call("GET", "/account")).json()["id"] == own.id
            assert (await account.call("DELETE", "/account/members/mallory@example.com")).status_code == 204
            assert await held.finish() == (401, "UNAUTHORIZED")
            assert await measure() < ENDS_SECONDS


async def test_what_was_held_while_the_account_is_deleted_changes_nothing(gw: Gateway) -> None:
    account = await gw.account()
    name = (await account.get()).json()["name"]
    held = await Held.open(gw, "POST", "/account/keys", bearer(account))
    await asyncio.sleep(0.2)
    assert (await account.call("POST", "/account/deletion", {"name": name})).status_code == 202
    assert await held.finish() == (403, "APP_SUSPENDED")
    assert len((await account.get("/account/keys")).json()) == 1


# -- places ----------------------------------------------------------------------------------------------------


async def test_a_key_that_sends_no_bodies_locks_nobody_out(gw: Gateway, backend: FakeAppBackend) -> None:
    account = await gw.account()
    app = await account.app(backend)
    other = await account.add_key(scope="read", app=app.name)
    idle = [await Held.open(gw, "POST", "/mcp", bearer(other)) for _ in range(64)]
    await asyncio.sleep(0.2)
    refused(await other.call("POST", "/mcp", {}), 429, "RATE_LIMITED")
    assert (await other.get(f"/account/apps/{app.name}")).status_code == 200, "without a body, it needs no such place"
    assert (await account.call("POST", "/account/keys", {"name": "another"})).status_code == 201
    await revoke(account, other)
    for held in idle:
        held.close()


# -- streams ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def following(gw: Gateway, path: str, **headers: str) -> AsyncIterator[Callable[[], Coroutine[Any, Any, float]]]:
    """Yields a function that returns the seconds from now to the stream's end."""
    async with httpx.AsyncClient(base_url=gw.address, trust_env=False, timeout=60) as http:
        headers = {"Accept": "text/event-stream", **headers}
        async with http.stream("GET", path, headers=headers) as response:
            assert response.status_code == 200
            reading = asyncio.create_task(response.aread())
            await asyncio.sleep(0.5)
            assert not reading.done()

            async def measure() -> float:
                began = time.monotonic()
                await asyncio.wait_for(reading, 30)
                return time.monotonic() - began

            try:
                yield measure
            finally:
                reading.cancel()


async def test_the_streams_of_a_revoked_key_end(gw: Gateway, backend: FakeAppBackend) -> None:
    account = await gw.account()
    app = await account.app(backend, build={"command": "make", "start": "./serve"})
    other = await account.add_key(scope="read")
    headers = {"Authorization": f"Bearer {other.key}"}
    async with (
        following(gw, "/account/changes", **headers) as changes,
        following(gw, f"/account/apps/{app.name}/logs", **headers) as logs,
    ):
        await revoke(account, other)
        assert max(await asyncio.gather(changes(), logs())) < ENDS_SECONDS


async def test_the_streams_of_a_session_end_with_it(gw: Gateway, visitor: Visitor) -> None:
    await visitor.log_in((await gw.account()).key)
    await visitor.log_in_as_operator()
    for page, stream, name in (("dashboard", "/account/changes", ACCOUNT), ("ops", "/ops/events", OPERATOR)):
        async with following(gw, stream, Cookie=f"{name}={visitor.http.cookies[name]}") as measure:
            assert (await visitor.call("DELETE", f"/{page}/session")).status_code == 204
            assert await measure() < ENDS_SECONDS
