"""What each command asks the service, and what it prints of the answer.

`calls.txt` has a transcript: a command, what is typed after `<`, its exit code in brackets, its calls with their bodies
and answers, its errors after `!`, and its output. A command with --json prints the last answer. The calls are those of
the API: each body and answer is a value of the type that the route declares.
"""

import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
import pytest
import pytest_asyncio
from litestar.routes import HTTPRoute

from gateway.api import openapi
from gateway.app import Front
from gateway.services import Services
from gateway.settings import Settings
from tests.fakes.server import Exchange, FakeServer, Script, answer
from tests.support.command_line import Tool

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMMAND = re.compile(r"\$ (?P<words>.*?)(?: < (?P<given>.*?))?(?: \[(?P<code>\d)\])?")
CALL = re.compile(r"(?P<request>(?:GET|POST|PUT|PATCH|DELETE) /\S*)(?: (?P<body>\{.*?\}))?(?: → (?P<answer>.*))?")
REFUSAL = re.compile(r"(\d{3}) ([A-Z_]+)(?: (.+))?")


class Call(NamedTuple):
    request: str
    body: Any
    answer: Any
    status: int = 200


class Case(NamedTuple):
    command: str
    given: str
    code: int
    calls: list[Call]
    out: list[str]
    err: list[str]


def read_cases() -> list[Case]:
    names: dict[str, Any] = {}
    cases: list[Case] = []
    text = Path(__file__).with_name("calls.txt").read_text()
    for line in re.sub(r"\n  ", " ", text).splitlines():
        if found := re.fullmatch(r"([A-Z_]+) = (.*)", line):
            names[found[1]] = eval(found[2], names)
        elif found := COMMAND.fullmatch(line):
            given = "".join(shlex.split(found["given"] or ""))
            cases.append(Case(found["words"], given, int(found["code"] or 0), [], [], []))
        elif found := CALL.fullmatch(line):
            cases[-1].calls.append(read_call(names, *found.group("request", "body", "answer")))
        elif line and not line.startswith("# "):
            (cases[-1].err if line.startswith("! ") else cases[-1].out).append(line.removeprefix("! "))
    return cases


def read_call(names: dict[str, Any], request: str, body: str | None, reply: str | None) -> Call:
    sent = None if body is None else eval(body, names)
    if refusal := REFUSAL.fullmatch(reply or ""):
        error = {"code": refusal[2], "message": refusal[3] or "No.", "requestId": "r1"}
        return Call(request, sent, {"error": error}, int(refusal[1]))
    return Call(request, sent, None if reply is None else eval(reply, names), 204 if reply is None else 200)


CASES = read_cases()


class Service(FakeServer):
    """Answers the calls of a case in their order."""

    calls: list[Call]

    def script(self, exchange: Exchange) -> Script:
        call = self.calls[len(self.exchanges) - 1]
        return answer(call.status, b"" if call.answer is None else call.answer)


@pytest_asyncio.fixture(loop_scope="session")
async def service() -> AsyncIterator[Service]:
    async with Service() as service:
        yield service


def fold(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
async def test_a_command(case: Case, service: Service, tmp_path: Path) -> None:
    service.calls = case.calls
    is_operators = any("/platform/" in call.request for call in case.calls)
    capsule = Tool(service.address, "token" if is_operators else "csk_key", tmp_path)
    run = await capsule(*shlex.split(case.command), given=case.given)
    asked = [(f"{each.method} {each.path}", each.json if each.body else None) for each in service.exchanges]
    assert asked == [(call.request, call.body) for call in case.calls]
    assert (run.code, fold(run.err)) == (case.code, case.err)
    if "--json" in case.command and case.calls and not case.out:
        assert json.loads(run.out) == case.calls[-1].answer
    else:
        assert fold(run.out.replace(service.address, "SERVICE")) == case.out


async def test_the_calls_are_those_of_the_api() -> None:
    app = Front(Services(Settings(allow_private_addresses=True))).litestar
    paths = openapi.build(app)["paths"]
    routes = {
        f"{method} {re.sub('{[^}]+}', '[^/]+', route.path_format)}": (handler, operation)
        for route in app.routes
        if isinstance(route, HTTPRoute)
        for handler in route.route_handlers
        for method in handler.http_methods
        if (operation := paths.get(route.path_format, {}).get(method.lower()))
    }
    for call in (call for case in CASES for call in case.calls):
        address, _, query = call.request.partition("?")
        handler, operation = next(found for pattern, found in routes.items() if re.fullmatch(pattern, address))
        known = {each["name"] for each in operation.get("parameters", []) if each["in"] == "query"}
        assert {name for name, _ in parse_qsl(query, keep_blank_values=True)} <= known, call.request
        for value, kind in ((call.body, openapi.body_type(handler)), (call.answer, openapi.response_type(handler))):
            if value is not None and kind is not None and call.status == 200:
                msgspec.json.decode(json.dumps(value), type=kind)
