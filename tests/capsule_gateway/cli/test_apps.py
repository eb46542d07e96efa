"""`capsule apps create`, `set` and `delete`, against a running gateway."""

import json
import secrets
from pathlib import Path

import pytest

from tests.support.accounts import Account, App
from tests.support.command_line import Tool, run_in_terminal

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def name() -> str:
    return f"cli-{secrets.token_hex(4)}"


async def test_an_apps_life(capsule: Tool, name: str) -> None:
    assert "capsule apps create NAME" in (await capsule("apps", "list")).out
    made = await capsule("apps", "create", name)
    assert made.line == f"https://{name}.apps.localhost"
    assert f"capsule deploys publish {name}" in made.err
    assert name in (await capsule("apps", "list")).out
    assert "NAME_TAKEN" in await capsule.refused("apps", "create", name)
    assert (await capsule("apps", "remove", name, "--yes", "--json")).json == {"deleted": name}
    assert "NOT_FOUND" in await capsule.refused("apps", "remove", name, "--yes")


async def test_a_deletion_asks_for_the_name(capsule: Tool, account: Account, name: str) -> None:
    await capsule("apps", "create", name)
    assert "--yes" in await capsule.refused("apps", "remove", name, code=2)
    seen = run_in_terminal(capsule, "apps", "remove", name, given="other\n")
    assert "nothing was deleted" in seen
    assert name in (await capsule("apps", "list")).out
    assert f"Deleted {name}" in run_in_terminal(capsule, "apps", "remove", name, given=f"{name}\n")
    assert name not in (await capsule("apps", "list")).out


async def test_operators_delete_any_app(
    account: Account, capsule: Tool, operator: Tool, name: str, tmp_path: Path
) -> None:
    await capsule("apps", "create", name)
    assert "--yes" in await operator.refused("apps", "remove", name, code=2)
    assert f"Deleted {name}" in (await operator("apps", "remove", name, "--yes")).line
    stranger = Tool(account.gateway.address, "csk_none", tmp_path)
    assert "UNAUTHORIZED" in await stranger.refused("apps", "remove", name, "--yes")


async def test_a_token_is_checked(capsule: Tool, app: App) -> None:
    run = await capsule("apps", "check-token", app.name, given=f"{app.token('ana', role='editor')}\n")
    assert ["user", "ana"] in run.rows
    assert ["claim role", "editor"] in run.rows
    run = await capsule("apps", "check-token", app.name, "--json", given=app.token(expires=-60))
    assert (run.code, json.loads(run.out)["reason"]) == (1, "expired")
    assert run.err == "capsule: the token is not valid: expired\n"
    assert "standard input" in await capsule.refused("apps", "check-token", app.name, code=2)


async def test_a_change_of_the_auth_is_checked(capsule: Tool, app: App) -> None:
    checked = (await capsule("apps", "set", app.name, "--auth-jwks", app.backend.jwks_url)).rows[-1]
    assert checked == ["check", "3 keys: ES256, Ed25519, EdDSA, RS256"]
    failed = (await capsule("apps", "set", app.name, "--auth-jwks", f"{app.backend.address}/other")).out
    assert "saved, but tokens cannot be verified yet: 127.0.0.1 answered with status 404" in failed


async def test_settings_change_one_by_one(capsule: Tool, account: Account, name: str) -> None:
    await capsule("apps", "create", name)
    assert "none: the source is served" in (await capsule("apps", "set", name)).out
    jwks = "https://a.example/jwks.json"
    settings = (await capsule("apps", "set", name, "--auth-jwks", jwks, "--issuer", "me", "--json")).json
    assert settings["auth"] == {"kind": "jwks", "url": jwks, "issuer": "me"}
    settings = (await capsule("apps", "set", name, "--issuer", "none", "--audience", "us", "--json")).json
    assert settings["auth"] == {"kind": "jwks", "url": jwks, "audience": "us"}
    settings = (await capsule("apps", "set", name, "--build", "make", "--output", "out", "--json")).json
    assert settings["build"] == {"command": "make", "output": "out"}
    settings = (await capsule("apps", "set", name, "--build", "none", "--start", "node .", "--json")).json
    assert settings["build"] == {"output": "out", "start": "node ."}
    settings = (await capsule("apps", "set", name, "--health", "/up", "--json")).json
    assert settings["build"] == {"output": "out", "start": "node .", "health": "/up"}
    url = "https://git.example.com/a.git"
    settings = (await capsule("apps", "set", name, "--repository", url, "--branch", "next", "--json")).json
    assert settings["repository"] == {"url": url, "branch": "next", "hasCredentials": False}
    settings = (await capsule("apps", "set", name, "--branch", "main", "--json")).json
    assert settings["repository"]["branch"] == "main"
    cleared = await capsule("apps", "set", name, "--repository", "none", "--auth-jwks", "none", "--json")
    assert (cleared.json["repository"], cleared.json["auth"]) == (None, {"kind": "jwks"})


async def test_the_place_of_the_user_id(capsule: Tool, name: str) -> None:
    await capsule("apps", "create", name)
    backend = "https://a.example/auth-refresh"
    asked = ("--auth-backend", backend, "--auth-method", "POST", "--user-field", "record.id")
    settings = (await capsule("apps", "set", name, *asked, "--json")).json
    assert settings["auth"] == {"kind": "backend", "url": backend, "method": "POST", "userField": "record.id"}
    settings = (await capsule("apps", "set", name, "--user-field", "none", "--json")).json
    assert settings["auth"] == {"kind": "backend", "url": backend, "method": "POST"}
    assert "--auth-jwks" in await capsule.refused("apps", "set", name, "--user-claim", "uid", code=2)
    jwks = "https://a.example/jwks.json"
    settings = (await capsule("apps", "set", name, "--auth-jwks", jwks, "--user-claim", "uid", "--json")).json
    assert settings["auth"] == {"kind": "jwks", "url": jwks, "userClaim": "uid"}
    assert "--auth-backend" in await capsule.refused("apps", "set", name, "--user-field", "id", code=2)


async def test_secrets_stay_off_the_command_line(capsule: Tool, account: Account, name: str) -> None:
    await capsule("apps", "create", name)
    secret, password = secrets.token_hex(32), secrets.token_hex(8)
    account.gateway.confidential |= {secret, password}
    hint = await capsule.refused("apps", "set", name, "--repository", f"https://u:{password}@git.example.com/a", code=2)
    assert password not in hint
    typed = f"https://u:{password}@git.example.com/a\n"
    settings = (await capsule("apps", "set", name, "--repository", "-", "--json", given=typed)).json
    assert settings["repository"] == {"url": "https://git.example.com/a", "branch": "main", "hasCredentials": True}
    settings = (await capsule("apps", "set", name, "--auth-secret", "--json", given=f"{secret}\n")).json
    assert settings["auth"] == {"kind": "secret"}
    assert "--auth-secret" in await capsule.refused("apps", "set", name, "--issuer", "x", code=2)
    assert "only one" in await capsule.refused("apps", "set", name, "--auth-secret", "--auth-jwks", "x", code=2)
