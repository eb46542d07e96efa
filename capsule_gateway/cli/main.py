"""`capsule`: the command line, including the commands that run the service.

Exit codes: 0 success, 1 refused by the service, 2 wrong usage, 130 interrupted. Every error is one line on stderr.
"""

import asyncio
import contextlib
import functools
import importlib.util
import io
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import click

from capsule_gateway.cli.cells import strip_controls, text_of
from capsule_gateway.cli.commands import Group
from capsule_gateway.cli.service import (
    LOCAL_URL,
    Service,
    ServiceRefusal,
    WrongUsage,
    call_if_permitted,
    credentials_file,
    find_credentials,
    load_saved_credentials,
    parse_key,
    parse_url,
    save_credentials,
)
from capsule_gateway.cli.show import as_json, show_line

INTERRUPTED = 130

# The commands by topic, in the order of the help, and their modules of `capsule_gateway.cli`. Only the module of the
# command that runs is imported.
SERVICE_TOPIC = "Run the service"
TOPICS = {
    "Start here": {"login": "main", "new": "folders", "deploy": "folders"},
    "Apps": {
        "init": "manifest",
        "apps": "apps",
        "env": "environment",
        "logs": "environment",
        "domains": "domains",
        "data": "data",
        "open": "folders",
    },
    "Deploys": {"deploys": "deploys", "hooks": "account"},
    "Inference": {"usage": "usage", "requests": "usage", "limits": "limits"},
    "Events": {"webhooks": "account", "deliveries": "account"},
    "Account": {
        "account": "account",
        "keys": "api_keys",
        "members": "members",
        "audit": "operators",
        "whoami": "main",
        "logout": "main",
    },
    "Agents and shells": {"mcp": "main", "completion": "arguments"},
    "Operators": {
        "accounts": "operators",
        "inference": "operators",
        "providers": "operators",
        "prices": "operators",
    },
    SERVICE_TOPIC: {
        "dev": "dev",
        "serve": "processes",
        "worker": "processes",
        "doctor": "doctor",
        "backup": "backup",
        "restore": "backup",
        "secrets": "secrets",
    },
}
FORMERLY = {"hook": "hooks", "webhook": "webhooks"}
HIDDEN = {"domain": "domains"}
MODULES = {command: module for topic in (*TOPICS.values(), HIDDEN) for command, module in topic.items()}


class Tool(Group):
    """The command line, which prints every error as one line, and imports a command when it is used.

    The client's wheel has no commands that run the service.
    """

    def list_topics(self, ctx: click.Context) -> Mapping[str, list[str]]:
        return {
            topic: [name for name, module in commands.items() if _is_installed(module)]
            for topic, commands in TOPICS.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in self.list_topics(ctx).values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = self.formerly.get(cmd_name, cmd_name)
        if name in MODULES and name not in self.commands and _is_installed(MODULES[name]):
            module = importlib.import_module(f"capsule_gateway.cli.{MODULES[name]}")
            self.add_command(next(each for each in vars(module).values() if _is_command(each, name)))
        return super().get_command(ctx, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not self.get_command(ctx, args[0]):
            if args[0] in MODULES:
                raise click.UsageError(f"'{args[0]}' is a command of the service, which is not installed here.", ctx)
            for name in self.list_commands(ctx):  # click suggests a command that is already loaded
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

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
        except UnicodeEncodeError:  # it has the argument, which may be a secret
            _fail("an argument is not text in UTF-8", 2)
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
        sys.exit(code if isinstance(code, int) else 0)


@functools.cache
def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(f"capsule_gateway.cli.{module}") is not None


def _is_command(value: Any, name: str) -> bool:
    return isinstance(value, click.Command) and value.name == name


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"capsule: {strip_controls(' '.join(message.split()))}", err=True)
    sys.exit(code)


@click.group(cls=Tool, formerly=FORMERLY, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="capsule-gateway")
def main() -> None:
    """Publish apps, and manage inference, event webhooks and deploy hooks.

    Log in once with 'capsule login', or set CAPSULE_URL and CAPSULE_API_KEY. Operators set CAPSULE_API_KEY to the
    operator token.
    """


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
    name = f"{account.get('name')} ({account.get('id')})" if account else "a key that does not show its account"
    click.echo(strip_controls(f"Logged in to {url} as {name}. The key is saved in {path}."))
    if os.environ.get("CAPSULE_API_KEY"):
        click.echo("CAPSULE_API_KEY is set and takes precedence.", err=True)


def _fetch_account(url: str, key: str) -> dict[str, Any] | None:
    with Service(url, key) as service:
        try:
            return call_if_permitted(lambda: service.request_object("GET", "/account"))
        except ServiceRefusal as refused:
            if refused.status != 401:
                raise
            raise ServiceRefusal(
                f"this key is not valid at {url} (operators set CAPSULE_API_KEY to the operator token instead)"
            ) from None


@main.command()
@as_json
def whoami() -> None:
    """Show whose key the commands use, and at which address."""
    url, key = find_credentials()
    with Service(url, key) as service:
        if not service.is_account:
            service.request_object("GET", "/platform/inference", having="")
            return show_line({"url": url, "operator": True}, f"An operator at {url}")
        account = call_if_permitted(lambda: service.request_object("GET", "/account"))
    if account is None:
        return show_line({"url": url, "operator": False}, f"A key at {url} that does not show its account")
    answer = {"url": url, "operator": False, **{name: account.get(name) for name in ("id", "name", "plan")}}
    plan = text_of("plan")(account)
    show_line(answer, strip_controls(f"{account.get('name')} ({account.get('id')}) at {url}, on the plan {plan}"))


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
    """Serve the MCP tools, such as 'service_publish', with which agents publish and manage your apps.

    An MCP client starts this command and communicates with it over standard input and output.
    """
    url, key = find_credentials()
    try:
        from capsule_gateway.cli.mcp import serve_stdio
    except ModuleNotFoundError:
        line = f"curl -fsSL {url}/install.sh | sh -s mcp"
        raise click.ClickException(f"this command needs the MCP SDK; install it with: {line}") from None

    if sys.stdin.isatty():
        click.echo("Waiting for an MCP client on standard input. Press Ctrl-C to stop.", err=True)
    with Service(url, key) as service:
        asyncio.run(serve_stdio(service))
