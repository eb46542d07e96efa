"""`capsule domain`, against a running gateway and a DNS server."""

import secrets

import pytest

from tests.support.accounts import DOMAIN, App
from tests.support.command_line import Tool
from tests.support.dns_server import DnsServer

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def domain() -> str:
    return f"shop-{secrets.token_hex(4)}.example.com"


async def test_set_verify_show_and_clear(capsule: Tool, app: App, resolver: DnsServer, domain: str) -> None:
    assert "no custom domain" in await capsule.refused("domain", "show", app.name)
    rows = (await capsule("domain", "set", app.name, domain.upper())).rows
    assert rows[:3] == [["app", app.name], ["domain", domain], ["verified", "no"]]
    assert rows[4:6] == [["Records for its DNS:"], ["TYPE", "NAME", "VALUE"]]
    txt, cname = rows[6:8]
    assert txt[:2] == ["TXT", f"_capsule.{domain}"]
    assert cname == ["CNAME", domain, f"{app.name}.{DOMAIN}"]
    assert rows[-1] == [f"Create these records, then run: capsule domain verify {app.name}"]

    name, value = txt[1:]
    for texts, words in (
        ([], f"There is no TXT record at {name}."),
        (["x"], f"The TXT record at {name} has another value."),
    ):
        resolver.sets(name, *texts)
        error = await capsule.refused("domain", "verify", app.name)
        assert error.startswith(f"{domain} is not verified. {words} To see the records")
    run = await capsule("domain", "verify", app.name, "--json")
    assert (run.code, f'"problem": "The TXT record at {name} has another value."' in run.out) == (1, True)

    resolver.sets(name, value)
    assert (await capsule("domain", "verify", app.name)).line == f"{domain} is verified."
    run = await capsule("domain", "show", app.name)
    assert ["verified", "yes"] in run.rows
    assert "then run" not in run.out
    answer = (await capsule("domain", "show", app.name, "--json")).json
    assert (answer["domain"], answer["verified"], answer["records"][0]["value"]) == (domain, True, value)
    resolver.sets(name)
    assert (await capsule("domain", "verify", app.name)).line == (
        f"{domain} is verified. There is no TXT record at {name}."
    )

    assert (await capsule("domain", "clear", app.name)).line == f"Removed the custom domain of {app.name}."
    assert "no custom domain" in await capsule.refused("domain", "verify", app.name)


async def test_refusals(capsule: Tool, app: App) -> None:
    for arguments, code, words in (
        (("set", app.name, "https://example.com"), 1, "domain: a host name such as app.example.com"),
        (("set", app.name, f"x.{DOMAIN}"), 1, "is an address of this service"),
        (("set", "nowhere", "example.com"), 1, "NOT_FOUND"),
        (("set", app.name), 2, "DOMAIN"),
    ):
        assert words in await capsule.refused("domain", *arguments, code=code)
