"""No spelling of a private path reaches its page through the service's own Caddy, or a proxy that compares paths."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import pytest_asyncio
from litestar.routes import HTTPRoute

from gateway import app as application
from gateway.app import PRIVATE
from gateway.services import Services
from gateway.settings import Settings
from tests.fakes import FakeProvider
from tests.support.fixtures import module_fixture, provider
from tests.support.folders import passable_folder
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.hosted_apps import Hosting, Said
from workers.hosting.caddy import PUBLIC

__all__ = ["provider"]
pytestmark = pytest.mark.asyncio(loop_scope="session")

API = "api.example.com"
PAGES = {"/health": b'"ok"', "/ready": b'"ready"', "/metrics": b"# TYPE", "/platform/tls/allow": b"domain"}
FORGED = ("X-Forwarded-For: 127.0.0.1", "Forwarded: for=127.0.0.1", "X-Real-IP: ::1", "Connection: X-Forwarded-For")


def spellings(path: str) -> list[str]:
    """Returns some two hundred ways to write the path."""
    last, middle = path[-1], path[1:]
    escaped = "".join(f"%{ord(letter):02x}" for letter in middle)
    cores = (
        *(middle, middle.upper(), middle.title(), escaped, escaped.upper().replace("%", "%25")),
        *(f"{middle[:-1]}%{ord(last):02X}", middle.replace("/", "//"), middle.replace("/", "%2f"), f"./{middle}"),
        *(f"x/../{middle}", f"docs/../{middle}", f"docs/%2e%2e/{middle}", f"docs%2f..%2f{middle}"),
        *(f"platform/../{middle}", f"{middle}/../docs", f"..;/{middle}"),
    )
    before = ("/", "//", "///", "/%2f", "/%5c", "/.//")
    after = ("", "/", "//", "/.", "%2f", "%00", ";x=1", "?", "?/../docs", "#", "%20", "/..;/", "\\", "%3f", ".", "/%2e")
    made = [f"{start}{core}{end}" for core, start, end in itertools.product(cores, before[:2], after[:5])]
    made += [f"{start}{middle}{end}" for start, end in itertools.product(before, after)]
    made += [f"http://{API}{path}", f"http://{API}/{path}", f"http://evil.example{path}"]
    return list(dict.fromkeys(made))


@module_fixture
async def service(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hosting(service: Gateway) -> AsyncIterator[Hosting]:
    with passable_folder() as folder:
        upstream = urlsplit(service.address).netloc
        async with Hosting(folder).served(base_url=f"http://{API}", upstream=upstream) as hosting:
            yield hosting


@pytest.mark.parametrize("path", sorted(PRIVATE))
async def test_no_spelling_of_a_private_path_is_public(hosting: Hosting, path: str) -> None:
    written = spellings(path)
    assert len(written) >= 200
    for start in range(0, len(written), 20):
        asked = [
            hosting.ask(each, *headers, host=API) for each in written[start : start + 20] for headers in ((), FORGED)
        ]
        for number, said in enumerate(await asyncio.gather(*asked)):
            assert PAGES[path] not in said.body or said.status == 404, written[start + number // 2]
            assert said.status in (200, 400, 404, 421), written[start + number // 2]
            if said.status == 200:  # such as /metrics/../docs
                assert b"<html" in said.body or b"<!doctype" in said.body.lower(), written[start + number // 2]


@pytest.mark.parametrize("path", sorted(PRIVATE))
async def test_the_gateway_answers_only_the_exact_spelling(service: Gateway, path: str) -> None:
    """Whatever proxy stands before it."""
    direct = Hosting.__new__(Hosting)
    direct.port = urlsplit(service.address).port or 0
    answers: dict[str, Said] = {each: await direct.ask(each, host="localhost") for each in (path, *spellings(path))}
    assert PAGES[path] in answers.pop(path).body
    for each, said in answers.items():
        if unquote(urlsplit(each).path) != path or each.startswith("//"):
            assert PAGES[path] not in said.body or said.status == 404, each


async def test_public_paths_are_those_of_the_gateway(tmp_path: Path) -> None:
    front = application.Front(Services(Settings(data_dir=str(tmp_path))))
    paths = {route.path for route in front.litestar.routes if isinstance(route, HTTPRoute)}
    assert paths >= PRIVATE
    routed = {path.split("/")[1] for path in paths - PRIVATE} - {""}
    assert {*PUBLIC} == routed | {"capsule", "mcp"}
    assert {path for path in paths if path.startswith("/platform/tls")} <= PRIVATE
