"""Shell completion: the names of the account's apps, and the ids of its deploys and hooks.

If the service does not answer, it offers nothing and prints nothing: a message would disturb the line being typed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gateway.cli.service import Service, find_credentials

STEP_SECONDS = 2.0
LISTED_DEPLOYS = 50

Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def _completer(path: str, field: str, **query: Any) -> Complete:
    def complete(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
        try:
            with Service(*find_credentials(), timeout=STEP_SECONDS) as service:
                found = [str(row.get(field, "")) for row in service.list_rows(path, **query)]
        except click.ClickException:
            return []
        return [value for value in found if value.startswith(begun)]

    return complete


app_argument = click.argument("app", shell_complete=_completer("/account/apps", "name"))
deploy_argument = click.argument(
    "deploy_id", metavar="ID", shell_complete=_completer("/account/deploys", "id", limit=LISTED_DEPLOYS)
)
hook_argument = click.argument("hook_id", metavar="ID", shell_complete=_completer("/account/hooks", "id"))
