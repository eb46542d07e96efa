"""What the shell completes: the names of the account's apps, and the ids of its deploys and hooks.

A completion that cannot ask the service completes nothing, and says nothing: a message would be in the way of what is
being typed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gateway.cli.service import Service, find_credentials

TIMEOUT = 2.0  # seconds
DEPLOYS = 50

Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def _complete(path: str, field: str, **query: Any) -> Complete:
    def complete(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
        try:
            with Service(*find_credentials(), timeout=TIMEOUT) as service:
                found = [str(row.get(field, "")) for row in service.rows(path, **query)]
        except click.ClickException:
            return []
        return [value for value in found if value.startswith(begun)]

    return complete


app_argument = click.argument("app", shell_complete=_complete("/account/apps", "name"))
deploy_argument = click.argument(
    "deploy_id", metavar="ID", shell_complete=_complete("/account/deploys", "id", limit=DEPLOYS)
)
hook_argument = click.argument("hook_id", metavar="ID", shell_complete=_complete("/account/hooks", "id"))
