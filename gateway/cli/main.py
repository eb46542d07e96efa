"""`capsule`: the command line, including the commands that run the service.

Exit codes: 0 success, 1 refused by the service, 2 wrong usage, 130 interrupted. Every error is one line on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
from typing import Any, NoReturn

import click

from gateway.cli.account import account, deliveries, hook, webhook
from gateway.cli.apps import apps
from gateway.cli.data import data
from gateway.cli.deploys import deploys
from gateway.cli.dev import dev
from gateway.cli.domains import domain
from gateway.cli.environment import env, logs
from gateway.cli.folders import deploy, new
from gateway.cli.keys import keys
from gateway.cli.limits import limits
from gateway.cli.operators import accounts, audit, inference
from gateway.cli.processes import serve, worker
from gateway.cli.service import (
    LOCAL_URL,
    Refused,
    Service,
    WrongUsage,
    credentials_file,
    find_credentials,
    load_saved_credentials,
    parse_key,
    parse_url,
    save_credentials,
)
from gateway.cli.show import strip_controls
from gateway.cli.usage import requests, usage

INTERRUPTED = 130


class Tool(click.Group):
    """The command line, which prints every error as one line."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
        try:
            code = super().main(*args, **{"prog_name": "capsule", **options, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(2)
        except click.UsageError as error:
            hint = f" (see '{error.ctx.command_path} --help')" if error.ctx else ""
            _fail(f"{error.format_message().rstrip('.')}{hint}", error.exit_code)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except click.Abort:
            sys.exit(INTERRUPTED)
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"capsule: {strip_controls(' '.join(message.split()))}", err=True)
    sys.exit(code)


@click.group(cls=Tool, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="capsule-gateway")
def main() -> None:
    """Publish apps, and manage inference, event webhooks and deploy hooks.

    Log in once with 'capsule login', or set CAPSULE_URL and CAPSULE_API_KEY. Operators set CAPSULE_API_KEY to the
    operator token.
    """


FOLDER_COMMANDS = (new, deploy)
ACCOUNT_COMMANDS = (
    account,
    apps,
    data,
    deliveries,
    deploys,
    domain,
    env,
    hook,
    keys,
    limits,
    logs,
    requests,
    usage,
    webhook,
)
SERVICE_COMMANDS = (accounts, audit, dev, inference, serve, worker)
for command in (*FOLDER_COMMANDS, *ACCOUNT_COMMANDS, *SERVICE_COMMANDS):
    main.add_command(command)


@main.command()
@click.option("--url", help="Address of the service. The command prompts for it if omitted.")
def login(url: str | None) -> None:
    """Save the address of a service and an API key.

    The command prompts for the key. A script passes it on standard input: capsule login --url URL < key
    """
    interactive = sys.stdin.isatty()
    default = os.environ.get("CAPSULE_URL", "")
    with contextlib.suppress(WrongUsage):  # a damaged file will be replaced
        default = default or load_saved_credentials()[0]
    default = default or LOCAL_URL
    if url is None:
        url = click.prompt("Address of the service", default=default, err=True) if interactive else default
    url = parse_url(url)
    key = click.prompt("API key", hide_input=True, err=True) if interactive else sys.stdin.readline()
    if not (key := parse_key(key.strip())):
        raise WrongUsage("no key on standard input")
    account = _fetch_account(url, key)
    path = save_credentials(url, key)
    name = f"{account.get('name')} ({account.get('id')})"
    click.echo(strip_controls(f"Logged in to {url} as {name}. The key is saved in {path}."))
    if os.environ.get("CAPSULE_API_KEY"):
        click.echo("CAPSULE_API_KEY is set and takes precedence.", err=True)


def _fetch_account(url: str, key: str) -> dict[str, Any]:
    with Service(url, key) as service:
        try:
            return service.request_object("GET", "/account")
        except Refused as refused:
            if refused.status == 401:
                raise Refused(
                    f"this key is not valid at {url} (operators set CAPSULE_API_KEY to the operator token instead)"
                ) from None
            raise


@main.command()
def logout() -> None:
    """Delete the address and key that 'capsule login' saved."""
    try:
        credentials_file().unlink()
    except FileNotFoundError:
        click.echo("You were not logged in.")
    else:
        click.echo("Logged out. The key remains valid.")


@main.command()
def mcp() -> None:
    """Serve the MCP tools 'service_hook', 'service_deploy', 'service_app' and 'service_delivery'.

    An MCP client starts this command and communicates with it over standard input and output.
    """
    url, key = find_credentials()
    from gateway.cli.mcp import serve_stdio

    if sys.stdin.isatty():
        click.echo("Waiting for an MCP client on standard input. Press Ctrl-C to stop.", err=True)
    with Service(url, key) as service:
        asyncio.run(serve_stdio(service))
