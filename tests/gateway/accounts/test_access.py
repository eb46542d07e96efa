"""Every route of an account and agent tool has a row in the table, and a caller without one is refused."""

import pytest
from litestar.routes import HTTPRoute

from gateway.accounts.access import CALLS, ROLES, SCOPES, TOOL_CALLS, Access, Call, Right
from gateway.accounts.records import Account, App
from gateway.app import Front
from gateway.errors import NotPermitted
from gateway.mcp.server import TOOLS
from gateway.services import Services
from gateway.settings import Settings

ACCOUNT = Account(id="acc_1", name="One", plan="free", createdAt="")
NOTES = App(id="app-1", name="notes", account="acc_1", createdAt="")


def test_every_route_has_a_row() -> None:
    handlers = {
        f"{method} {route.path_format}": handler.fn.__name__
        for route in Front(Services(Settings(allow_private_addresses=True))).litestar.routes
        if isinstance(route, HTTPRoute) and route.path.startswith("/account")
        for handler in route.route_handlers
        for method in handler.http_methods - {"OPTIONS", "HEAD"}
    }
    assert {address: call.name for address, call in CALLS.items()} == handlers
    assert len({*handlers.values()}) == len(handlers)


def test_every_action_of_an_agent_tool_has_a_row() -> None:
    actions = {
        f"{tool.name} {action}" if len(tool.actions) > 1 else tool.name for tool in TOOLS for action in tool.actions
    }
    assert actions == TOOL_CALLS.keys()


def test_only_reading_is_open_to_readers() -> None:
    for address, call in CALLS.items():
        assert address.startswith("GET ") == ("read" in call.right.scopes) == ("viewer" in call.right.roles), address
        assert "full" in call.right.scopes
        assert "owner" in call.right.roles


def test_what_developers_may_not() -> None:
    refused = {call.name for call in CALLS.values() if "developer" not in call.right.roles}
    assert refused == {"create_key", "revoke_key", "set_member", "remove_member", "change_limits", "delete_app"} | {
        "leave",
        "keep_account",
    }


def test_a_call_without_a_row_is_refused_to_everyone() -> None:
    with pytest.raises(NotPermitted):
        Access(ACCOUNT).require(None)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("role", ROLES)
def test_a_call_needs_both_the_scope_and_the_role(scope: str, role: str) -> None:
    for right in Right:
        access = Access(ACCOUNT, scope=scope, role=role)  # type: ignore[arg-type]
        call = Call("call", right)
        if scope in right.scopes and role in right.roles:
            access.require(call)
        else:
            with pytest.raises(NotPermitted):
                access.require(call)


def test_a_key_for_one_app_reaches_no_other() -> None:
    access = Access(ACCOUNT, scope="read", only=NOTES)
    for own in ("app-1", "notes"):
        access.require_app(own)
    for other in ("app-2", "shop", "", "note"):
        assert not access.reaches(other)
        with pytest.raises(NotPermitted, match="notes"):
            access.require_app(other)
    with pytest.raises(NotPermitted, match="notes"):
        access.require(CALLS["GET /account"])
