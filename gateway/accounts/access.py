"""Decides what the caller of an account may do, from one table of all calls.

A caller is an API key, the session that it opened, or a member who signed in. A key has a scope, and a key for deploys
or for reading may be limited to one app. A member has a role. A call is permitted if its row admits both the scope and
the role; a key has the role of an owner, and a member the full scope.

The account API and the agent tools check each call with `Access.require`. A call without a row is refused, and a test
fails. docs/api.md is made from this table.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple, get_args

import msgspec

from gateway.accounts.records import Account, App
from gateway.errors import AppSuspended, NotPermitted

Scope = Literal["full", "deploy", "read"]
By = Literal["key", "session", "operator"]
Role = Literal["owner", "developer", "viewer"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
ROLES: tuple[Role, ...] = get_args(Role)


class Right(Enum):
    """The scopes and roles that a kind of call admits."""

    READ = {"full", "read"}, {"owner", "developer", "viewer"}
    READ_DEPLOYS = {"full", "deploy", "read"}, {"owner", "developer", "viewer"}
    DEPLOY = {"full", "deploy"}, {"owner", "developer"}
    DEVELOP = {"full"}, {"owner", "developer"}
    OWN = {"full"}, {"owner"}

    def __init__(self, scopes: set[Scope], roles: set[Role]) -> None:
        self.scopes, self.roles = scopes, roles


class Where(Enum):
    """How a call concerns one app, which decides what a key for one app may do with it."""

    ACCOUNT = "the whole account: a key for one app may not"
    APP = "the app that the call names, or whose record it names: the app is compared when it is found"
    FILTER = "the app in the parameter `app`, which is set to the key's app"
    ROWS = "all apps: the response has only the key's app"


UNCHANGING = {"check_token"}  # calls that change nothing, although they are no GET

# Changes that are permitted while the account is deleted.
WHILE_LEAVING = {"leave", "keep_account", "revoke_key", "remove_member"}

# Changes that take rights away. They have a lane of their own: see `gateway/accounts/pacing.py`.
TAKES_RIGHTS = {"revoke_key", "set_member", "remove_member"}


class Call(NamedTuple):
    """What a row of the table says."""

    name: str  # of its handler, and in the account's audit trail
    right: Right
    where: Where = Where.ACCOUNT
    tools: str = ""  # the actions of agent tools that do the same, separated by commas
    commands: str = ""  # those of the command line

    @property
    def changes(self) -> bool:
        """Returns whether the call may change something of the account."""
        return "read" not in self.right.scopes and self.name not in UNCHANGING

    @property
    def stops_with_deletion(self) -> bool:
        """Returns whether the call is refused while the account is being deleted."""
        return self.changes and self.name not in WHILE_LEAVING


READ, READ_DEPLOYS, DEPLOY, DEVELOP, OWN = Right
ACCOUNT, APP, FILTER, ROWS = Where

CALLS = {
    "GET /account": Call("show_account", READ, commands="account, login, whoami"),
    "PATCH /account": Call("rename_account", DEVELOP, commands="account"),
    "POST /account/deletion": Call("leave", OWN, commands="account delete"),
    "DELETE /account/deletion": Call("keep_account", OWN, commands="account keep"),
    "GET /account/usage": Call("show_usage", READ, FILTER, "service_usage", "usage"),
    "GET /account/requests": Call("list_requests", READ, FILTER, commands="requests"),
    "GET /account/requests/figures": Call("show_request_figures", READ, FILTER, commands="requests"),
    "GET /account/requests/{request_id}": Call("show_request", READ, APP, commands="requests"),
    "GET /account/changes": Call("stream_changes", READ),
    "GET /account/audit": Call("list_changes", READ, commands="audit"),
    "GET /account/keys": Call("list_keys", READ, commands="keys list"),
    "POST /account/keys": Call("create_key", OWN, commands="keys create"),
    "DELETE /account/keys/{key_id}": Call("revoke_key", OWN, commands="keys remove"),
    "GET /account/members": Call("list_members", READ, ACCOUNT, "service_members list", "members list"),
    "PUT /account/members/{email}": Call("set_member", OWN, ACCOUNT, "service_members invite", "members set"),
    "DELETE /account/members/{email}": Call("remove_member", OWN, ACCOUNT, "service_members remove", "members remove"),
    "GET /account/notices": Call("show_notices", READ),
    "PUT /account/notices": Call("choose_notices", DEVELOP),
    "GET /account/apps": Call("list_apps", READ, ROWS, "service_app list", "apps list"),
    "POST /account/apps": Call("create_app", DEVELOP, ACCOUNT, "service_app create", "apps create"),
    "GET /account/apps/{app}": Call("show_app", READ, APP, "service_app show", "apps show, open"),
    "PATCH /account/apps/{app}": Call("change_app", DEVELOP, APP, "service_app set", "apps set"),
    "DELETE /account/apps/{app}": Call("delete_app", OWN, APP, "service_app delete", "apps remove"),
    "GET /account/apps/{app}/settings": Call("show_settings", READ, APP, commands="apps set"),
    "GET /account/apps/{app}/findings": Call("list_findings", READ, APP, commands="apps show"),
    "GET /account/apps/{app}/crashes": Call("list_crashes", READ, APP, commands="apps show"),
    "POST /account/apps/{app}/token-check": Call("check_token", DEVELOP, APP, commands="apps check-token"),
    "POST /account/apps/{app}/test-token": Call("create_test_token", DEVELOP, APP),
    "GET /account/apps/{app}/limits": Call("show_limits", READ, APP, "service_limits show", "limits show"),
    "PUT /account/apps/{app}/limits": Call("change_limits", OWN, APP, "service_limits set", "limits set"),
    "GET /account/apps/{app}/spend": Call("show_spend", READ, APP, "service_limits show", "limits show"),
    "GET /account/apps/{app}/domains": Call("list_domains", READ, APP, commands="domains list"),
    "PUT /account/apps/{app}/domains/{domain}": Call("put_domain", DEVELOP, APP, commands="domains set"),
    "POST /account/apps/{app}/domains/{domain}/verify": Call("prove_domain", DEVELOP, APP, commands="domains verify"),
    "DELETE /account/apps/{app}/domains/{domain}": Call("remove_domain", DEVELOP, APP, commands="domains remove"),
    "GET /account/apps/{app}/domain": Call("show_domain", READ, APP),
    "PUT /account/apps/{app}/domain": Call("set_domain", DEVELOP, APP),
    "POST /account/apps/{app}/domain/verify": Call("verify_domain", DEVELOP, APP),
    "DELETE /account/apps/{app}/domain": Call("clear_domain", DEVELOP, APP),
    "GET /account/apps/{app}/data": Call("show_data", READ, APP, commands="data show"),
    "POST /account/apps/{app}/data/snapshots": Call("make_snapshot", DEVELOP, APP, commands="data snapshot"),
    "GET /account/apps/{app}/data/snapshots/{snapshot_id}": Call(
        "download_snapshot", READ, APP, commands="data download"
    ),
    "POST /account/apps/{app}/data/restore": Call("restore_data", DEVELOP, APP, commands="data restore"),
    "DELETE /account/apps/{app}/data": Call("clear_data", DEVELOP, APP, commands="data clear"),
    "GET /account/data/deleted": Call("list_deleted_data", READ, commands="data deleted"),
    "PUT /account/apps/{app}/source": Call("publish", DEPLOY, APP, "service_publish", "deploy, deploys publish"),
    "POST /account/apps/{app}/deploys": Call("publish_branch", DEPLOY, APP, commands="deploys preview"),
    "DELETE /account/apps/{app}/previews/{slug}": Call(
        "end_preview", DEPLOY, APP, "service_deploy end_preview", "deploys end-preview"
    ),
    "POST /account/apps/{app}/rollback": Call("roll_back", DEPLOY, APP, "service_deploy rollback", "deploys rollback"),
    "POST /account/apps/{app}/build-cache/clear": Call("clear_build_cache", DEPLOY, APP, commands="deploy"),
    "GET /account/apps/{app}/logs": Call("read_logs", READ_DEPLOYS, APP, "service_logs", "logs"),
    "GET /account/deploys": Call("list_deploys", READ_DEPLOYS, FILTER, "service_deploy list", "deploys list"),
    "GET /account/deploys/{deploy_id}": Call(
        "show_deploy", READ_DEPLOYS, APP, "service_deploy show, service_logs", "deploys show"
    ),
    "POST /account/deploys/{deploy_id}/promote": Call("promote", DEPLOY, APP, commands="deploys promote"),
    "POST /account/deploys/{deploy_id}/redeploy": Call("redeploy", DEPLOY, APP, commands="deploys redeploy"),
    "POST /account/deploys/{deploy_id}/cancel": Call("cancel", DEPLOY, APP, "service_deploy cancel", "deploys cancel"),
    "GET /account/apps/{app}/env": Call("list_variables", READ, APP, "service_env list", "env list"),
    "PUT /account/apps/{app}/env": Call(
        "change_variables", DEVELOP, APP, "service_env set, service_env unset", "env set, env remove"
    ),
    "GET /account/hooks": Call("list_hooks", READ, ROWS, "service_hook list", "hooks list"),
    "POST /account/apps/{app}/hooks": Call("create_hook", DEVELOP, APP, "service_hook create", "hooks create"),
    "DELETE /account/hooks/{hook_id}": Call("revoke_hook", DEVELOP, ACCOUNT, "service_hook revoke", "hooks remove"),
    "GET /account/webhook": Call("show_webhook", READ, commands="webhooks show"),
    "PUT /account/webhook": Call("set_webhook", DEVELOP, commands="webhooks set"),
    "DELETE /account/webhook": Call("clear_webhook", DEVELOP, commands="webhooks remove"),
    "POST /account/webhook/rotate": Call("rotate_secret", DEVELOP, commands="webhooks rotate"),
    "POST /account/webhook/test": Call("test_webhook", DEVELOP, commands="webhooks test"),
    "GET /account/deliveries": Call("list_deliveries", READ, FILTER, "service_delivery list", "deliveries list"),
    "GET /account/deliveries/{delivery_id}": Call(
        "show_delivery", READ, APP, "service_delivery show", "deliveries show"
    ),
    "POST /account/deliveries/{delivery_id}/redeliver": Call(
        "redeliver", DEVELOP, ACCOUNT, "service_delivery redeliver", "deliveries redeliver"
    ),
    "POST /account/deliveries/redeliver": Call(
        "redeliver_failed", DEVELOP, ACCOUNT, "service_delivery redeliver_failed", "deliveries redeliver"
    ),
}


def split(names: str) -> list[str]:
    return names.split(", ") if names else []


# By the action of an agent tool. An action that makes several calls needs the right to each.
TOOL_CALLS: dict[str, list[Call]] = {}
for _call in CALLS.values():
    for _tool in split(_call.tools):
        TOOL_CALLS.setdefault(_tool, []).append(_call)


class Access(msgspec.Struct, frozen=True):
    """A caller of an account, and what it may do."""

    account: Account
    who: str = ""  # in the account's audit trail
    by: By = "key"
    scope: Scope = "full"
    role: Role = "owner"
    email: str = ""  # of the member who signed in; empty for an API key, and for the session that it opened
    only: App | None = None  # the app to which the key is limited
    key_id: str = ""  # of the API key, also of the one that opened the session; empty for a member

    @property
    def name(self) -> str:
        """The name of the API key, or the address of the member, as a deploy's row shows it."""
        return self.email or self.who.rpartition(" (")[0]

    def admits(self, call: Call) -> bool:
        """Returns whether the scope and the role include the call."""
        return self.scope in call.right.scopes and self.role in call.right.roles

    def require(self, call: Call | None) -> None:
        """Raises NotPermitted unless the caller may make this call, of at least one app."""
        if call is None:
            raise NotPermitted
        if self.account.deletion is not None and call.stops_with_deletion:
            raise AppSuspended("The account is being deleted. Keep it first, with DELETE /account/deletion.")
        if self.scope not in call.right.scopes:
            raise NotPermitted(f"This API key has the scope '{self.scope}', which does not include this call.")
        if self.role not in call.right.roles:
            raise NotPermitted(f"You are a {self.role} of this account, and may not make this call.")
        if self.only is not None and call.where is ACCOUNT:
            raise NotPermitted(f"This API key is for the app {self.only.name} only.")

    def reaches(self, app: str) -> bool:
        """Returns whether the caller may see the app, given its id or its present name."""
        return self.only is None or app in (self.only.id, self.only.name)

    def require_app(self, app: str) -> None:
        """Raises NotPermitted unless the caller may see the app, given its id or its present name."""
        if self.only is not None and not self.reaches(app):
            raise NotPermitted(f"This API key is for the app {self.only.name} only.")
