"""Arguments and options that several commands have, their completion, and `capsule completion`.

If APP is missing, `capsule.toml` in the working folder or above names the app. An app's name has only lower-case
letters, digits and hyphens. An argument with other characters, such as an id, a path or a domain, is therefore one of
the command's next arguments, and APP is missing.

Completion offers what the account has: names of apps and of their variables, ids of deploys, hooks, keys, snapshots,
deliveries and requests, and addresses of members. If the service does not answer, it offers nothing and prints nothing:
a message would disturb the line being typed.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

import click

from capsule_gateway.cli.service import Service, WrongUsage, find_credentials

MANIFEST = "capsule.toml"
NAME = re.compile(r"[a-z0-9-]+", re.ASCII)
STEP_SECONDS = 2.0  # timeout of completion
LISTED = 50  # of lists that may be long
FOLLOW_SECONDS = 1800
SHELLS = ("bash", "zsh", "fish")

Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def find_app_name() -> str | None:
    """Returns the name in the nearest manifest, or None without one. Raises WrongUsage if it cannot be read."""
    from gateway.settings.text_files import decode_text
    from gateway.settings.toml import parse_toml

    for folder in _list_folders():
        manifest = folder / MANIFEST
        if not manifest.is_file():
            continue
        try:
            name = parse_toml(decode_text(manifest.read_bytes())).get("name")
        except (OSError, ValueError) as error:
            raise WrongUsage(f"{manifest} cannot be read: {error}") from None
        return name if isinstance(name, str) and NAME.fullmatch(name) else None
    return None


def _list_folders() -> Iterator[Path]:
    """Yields the working folder and those above it, up to the root of the repository or the user's home."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        yield folder
        if (folder / ".git").exists() or folder == Path.home():
            return


class AppArgument(click.Argument):
    """APP as the first argument of a command. In the folder of an app, it may be omitted."""

    def __init__(self, declarations: Any, **options: Any) -> None:
        super().__init__(declarations, **{"required": False, **options})

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        assert isinstance(opts, dict)  # the raw arguments of the command, of which APP is the first to be processed
        if not ctx.resilient_parsing:  # otherwise the shell completes an unfinished line
            self._fill_in(ctx, opts)
        return super().handle_parse_result(ctx, opts, args)

    def _fill_in(self, ctx: click.Context, raw: dict[str, Any]) -> None:
        """Sets APP from the manifest if it is missing. Raises UsageError if there is none."""
        given = raw.get("app")
        following = [param for param in ctx.command.params if isinstance(param, click.Argument) and param is not self]
        is_name = isinstance(given, str) and NAME.fullmatch(given) is not None
        if is_name and all(_is_given(raw, param) for param in following if param.required):
            return
        name = find_app_name()
        if name is None and is_name:
            return  # click names the argument that is missing
        if isinstance(given, str) and (name is None or not _move_right(raw, given, following)):
            raise click.BadParameter(f"{given!r} is not the name of an app.", ctx, self)
        if name is None:
            raise click.UsageError(
                f"Missing argument 'APP': give it, or use a folder whose {MANIFEST} names the app.", ctx
            )
        raw["app"] = name


def _is_given(raw: Mapping[str, Any], param: click.Argument) -> bool:
    return isinstance(raw.get(str(param.name)), str | tuple)


def _move_right(raw: dict[str, Any], value: str, params: list[click.Argument]) -> bool:
    """Makes `value` the first of these arguments. Returns False if there is no room."""
    for param in params:
        name = str(param.name)
        if param.nargs == -1:
            raw[name] = (value, *(raw[name] if _is_given(raw, param) else ()))
            return True
        previous, raw[name] = raw.get(name), value
        if not isinstance(previous, str):
            return True
        value = previous
    return False


class RenamedOption(click.Option):
    """An option whose former names keep working. Neither help nor completion shows them."""

    def __init__(self, *arguments: Any, formerly: Sequence[str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._formerly = formerly

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        parser.add_option(obj=self, opts=self._formerly, dest=self.name, action="store")


class NumberType(click.IntRange):
    """A whole number in a range. Help and errors call it a number; click calls it an integer range."""

    name = "number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"


# -- completion -------------------------------------------------------------------------------------------------


def completer(address: str, field: str, rows: str = "", **query: Any) -> Complete:
    """Returns a function that offers this field of the rows at the address, which may contain {app}.

    `rows` is the field of the answer that has the rows, unless the answer is a list.
    """

    def complete(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
        target = address.format(app=quote(str(context.params.get("app")), safe=""))
        try:
            with Service(*find_credentials(), timeout=STEP_SECONDS) as service:
                found = (
                    service.request_object("GET", target, having=rows)[rows]
                    if rows
                    else service.list_rows(target, **query)
                )
                values = [str(row.get(field, "")) for row in found]
        except (click.ClickException, AttributeError, TypeError):
            return []
        return [value for value in dict.fromkeys(values) if value.startswith(begun)]

    return complete


complete_app = completer("/account/apps", "name")
complete_deploy = completer("/account/deploys", "id", limit=LISTED)
complete_delivery = completer("/account/deliveries", "id", limit=LISTED)
complete_request = completer("/account/requests", "id", limit=LISTED)
complete_snapshot = completer("/account/apps/{app}/data", "id", rows="snapshots")
complete_variable = completer("/account/apps/{app}/env", "name")
app_argument = click.argument("app", cls=AppArgument, shell_complete=complete_app)
deploy_argument = click.argument("deploy_id", metavar="ID", shell_complete=complete_deploy)
hook_argument = click.argument("hook_id", metavar="ID", shell_complete=completer("/account/hooks", "id"))

folder_argument = click.argument(
    "folder", metavar="[DIR]", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
account_argument = click.argument("account", metavar="ID")
follow_option = click.option("--follow", is_flag=True, help="Print the log and each state until the deploy ends.")
message_option = click.option(
    "-m", "--message", metavar="TEXT", help="What has changed; by default the first line of git's last commit."
)
timeout_option = click.option(
    "--timeout",
    default=FOLLOW_SECONDS,
    show_default=True,
    type=NumberType(1),
    metavar="SECONDS",
    help="Maximum time to follow.",
)


class TimeType(click.ParamType[str]):
    """A time as the API takes it, which is sent as it is."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from gateway.ids import A_TIME, read_time

        try:
            read_time(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a time; use {A_TIME}", param, ctx)
        return str(value)


TIME = TimeType()
limit = click.option("--limit", default=20, show_default=True, type=NumberType(1, 1000), help="Maximum number of rows.")
reason = click.option("--reason", metavar="TEXT", help="Operators: why, for the audit trail; up to 500 characters.")

# What a word in the usage of a declared command means. Every other word, such as NAME, is a plain argument.
WORDS = {
    "APP": app_argument,
    "ACCOUNT": account_argument,
    "DEPLOY": deploy_argument,
    "[DEPLOY]": click.argument("deploy_id", metavar="[ID]", required=False, shell_complete=complete_deploy),
    "DELIVERY": click.argument("id", metavar="ID", shell_complete=complete_delivery),
    "HOOK": hook_argument,
    "KEY_ID": click.argument("id", metavar="ID", shell_complete=completer("/account/keys", "id")),
    "MEMBER": click.argument("email", metavar="EMAIL", shell_complete=completer("/account/members", "email")),
    "SNAPSHOT": click.argument("snapshot_id", metavar="ID", shell_complete=complete_snapshot),
    "--follow": follow_option,
    "--reason": reason,
    "--timeout": timeout_option,
}


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
