"""Shell completion: prints the shell's script, and completes names of the account's apps, and ids of deploys and hooks.

If the service does not answer, it offers nothing and prints nothing: a message would disturb the line being typed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import click

from capsule_gateway.cli.app_argument import AppArgument
from capsule_gateway.cli.service import Service, WrongUsage, find_credentials

STEP_SECONDS = 2.0
LISTED_DEPLOYS = 50
SHELLS = ("bash", "zsh", "fish")

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


complete_app = _completer("/account/apps", "name")
app_argument = click.argument("app", cls=AppArgument, shell_complete=complete_app)
deploy_argument = click.argument(
    "deploy_id", metavar="ID", shell_complete=_completer("/account/deploys", "id", limit=LISTED_DEPLOYS)
)
hook_argument = click.argument("hook_id", metavar="ID", shell_complete=_completer("/account/hooks", "id"))


@click.command()
@click.argument("shell", metavar="[SHELL]", required=False, type=click.Choice(SHELLS))
def completion(shell: str | None) -> None:
    """Print the completion script for SHELL: bash, zsh or fish. The default is the shell in $SHELL.

    \b
    bash    add to ~/.bashrc:  eval "$(capsule completion bash)"
    zsh     add to ~/.zshrc:   eval "$(capsule completion zsh)"
    fish    capsule completion fish > ~/.config/fish/completions/capsule.fish
    """
    from click.shell_completion import get_completion_class

    name = shell or PurePath(os.environ.get("SHELL", "")).name
    found = get_completion_class(name) if name in SHELLS else None
    if found is None:
        raise WrongUsage(f"name the shell: capsule completion {'|'.join(SHELLS)}")
    root = click.get_current_context().find_root()
    click.echo(found(root.command, {}, "capsule", "_CAPSULE_COMPLETE").source())
