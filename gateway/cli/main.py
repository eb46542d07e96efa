"""`capsule`: the command line tool, and the commands that run the service.

Exit 0 is done, 1 refused by the service, 2 wrong usage, 130 interrupted. Every error is one line on stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, NoReturn

import click

from gateway.cli.account import account, deliveries, hook, webhook
from gateway.cli.deploys import deploys
from gateway.cli.operators import accounts, apps, inference
from gateway.cli.service import (
    LOCAL,
    Misused,
    Refused,
    Service,
    checked_key,
    checked_url,
    credentials,
    keep,
    kept,
    kept_file,
)
from gateway.cli.show import clean

INTERRUPTED = 130


class Tool(click.Group):
    """Prints every error in one line."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
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
    click.echo(f"capsule: {clean(' '.join(message.split()))}", err=True)
    sys.exit(code)


@click.group(cls=Tool, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="capsule-gateway")
def main() -> None:
    """Managed inference, event webhooks and deploy hooks.

    Speaks to the service that 'capsule login' was told of, or to CAPSULE_URL with CAPSULE_API_KEY: an account's API
    key or, for the operators' commands, the operator token.
    """


for command in (account, accounts, apps, deliveries, deploys, hook, inference, webhook):
    main.add_command(command)


# -- logging in ----------------------------------------------------------------------------------------------


@main.command()
@click.option("--url", help="The service's address; asked for when left out.")
def login(url: str | None) -> None:
    """Keep an address and an API key for the commands that follow.

    The key is asked for, or read from standard input: capsule login --url URL < key
    """
    asked = sys.stdin.isatty()
    known = os.environ.get("CAPSULE_URL", "")
    with contextlib.suppress(Misused):  # a broken file is about to be replaced
        known = known or kept()[0]
    if url is None:
        url = click.prompt("Address of the service", default=known or LOCAL, err=True) if asked else known or LOCAL
    url = checked_url(url)
    key = click.prompt("API key", hide_input=True, err=True) if asked else sys.stdin.readline()
    if not (key := checked_key(key.strip())):
        raise Misused("no key came on standard input")
    with Service(url, key) as service:
        try:
            account = service.fields("GET", "/account")
        except Refused as refused:
            if refused.status == 401:
                raise Refused(f"{url} does not know this key (operators set their token as CAPSULE_API_KEY)") from None
            raise
    path = keep(url, key)
    click.echo(clean(f"Logged in at {url} as {account.get('name')} ({account.get('id')}); kept in {path}."))
    if os.environ.get("CAPSULE_API_KEY"):
        click.echo("CAPSULE_API_KEY is set and still wins over it.", err=True)


@main.command()
def logout() -> None:
    """Forget the address and the key that 'capsule login' kept."""
    try:
        kept_file().unlink()
    except FileNotFoundError:
        click.echo("You were not logged in.")
    else:
        click.echo("Logged out. The key itself stays valid.")


# -- running the service -------------------------------------------------------------------------------------


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535))
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Processes.")
def serve(host: str, port: int, workers: int) -> None:
    """Run the gateway."""
    from gateway.server import serve as run
    from gateway.settings import BadSettings, load

    try:
        settings = load()
    except BadSettings as error:
        # The one message of several lines: each names a variable.
        click.echo(f"capsule: the settings are wrong:\n{error}", err=True)
        sys.exit(1)
    run(host, port, workers, settings.drain)


@main.command()
@click.argument("names", nargs=-1)
def worker(names: tuple[str, ...]) -> None:
    """Run the workers NAMES, or webhooks, deploys and monitors.

    NAMES: webhooks, deploys, sites (serves the hosted apps alone; it is in deploys as well), monitors.
    """
    from workers.__main__ import main as run

    sys.exit(run(list(names)))


@main.command()
def mcp() -> None:
    """Run the agent tool 'service_hook' over stdio.

    For an MCP client, which starts this command and speaks to it on standard input and output.
    """
    url, key = credentials()
    from gateway.cli.agents import serve_stdio

    if sys.stdin.isatty():
        click.echo("Waiting for an MCP client on standard input; Ctrl-C ends it.", err=True)
    with Service(url, key) as service:
        serve_stdio(service)
