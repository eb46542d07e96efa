"""`capsule domains` and `capsule domain`, against a running gateway and a DNS server."""

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
    assert rows[:4] == [["app", app.name], ["domain", domain], ["primary", "yes"], ["verified", "no"]]
    assert rows[5:7] == [["Records for its DNS:"], ["TYPE", "NAME", "VALUE"]]
    txt, cname = rows[7:9]
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


async def test_several_domains(capsule: Tool, app: App, resolver: DnsServer, domain: str) -> None:
    www = f"www.{domain}"
    assert (await capsule("domains", "list", app.name)).line == (
        f"{app.name} has no custom domain. Set one with: capsule domains set {app.name} DOMAIN"
    )
    for name in (domain, www):
        rows = (await capsule("domains", "set", app.name, f" {name.upper()}. ")).rows
        assert rows[1] == ["domain", name]
        assert rows[-1] == [f"Create these records, then run: capsule domains verify {app.name} {name}"]
    error = await capsule.refused("domains", "verify", app.name, www)
    assert error.endswith(f"To see the records that it needs, run: capsule domains set {app.name} {www}")
    resolver.sets(
        f"_capsule.{www}", (await capsule("domains", "list", app.name, "--json")).json[1]["records"][0]["value"]
    )
    assert (await capsule("domains", "verify", app.name, www)).line == f"{www} is verified."
    assert (await capsule("domains", "list", app.name)).rows == [
        ["DOMAIN", "PRIMARY", "VERIFIED"],
        [domain, "yes", "no"],
        [www, "yes"],
    ]
    rows = (await capsule("domains", "set", app.name, www, "--primary")).rows
    assert rows[1:4] == [["domain", www], ["primary", "yes"], ["verified", "yes"]]
    assert (await capsule("domain", "show", app.name)).rows[1] == ["domain", www]
    shown = (await capsule("apps", "show", app.name)).rows
    assert ["custom domain", f"{www}, {domain} (not verified)"] in shown
    assert (await capsule("domains", "remove", app.name, www)).line == f"Removed {www} of {app.name}."
    assert [row["domain"] for row in (await capsule("domains", "list", app.name, "--json")).json] == [domain]
    for number in range(4):
        await capsule("domains", "set", app.name, f"d{number}.{domain}")
    assert "DOMAIN_LIMIT_REACHED" in await capsule.refused("domains", "set", app.name, www)
    assert "NOT_FOUND" in await capsule.refused("domains", "remove", app.name, www)
    assert "DOMAIN" in await capsule.refused("domains", "verify", app.name, code=2)


async def test_refusals(capsule: Tool, app: App) -> None:
    for arguments, code, words in (
        (("set", app.name, "https://example.com"), 1, "DOMAIN: a host name such as app.example.com"),
        (("set", app.name, f"x.{DOMAIN}"), 1, "is an address of this service"),
        (("set", "nowhere", "example.com"), 1, "NOT_FOUND"),
        (("set", app.name), 2, "DOMAIN"),
    ):
        assert words in await capsule.refused("domain", *arguments, code=code)
