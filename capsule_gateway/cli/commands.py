"""Declares commands that send one request and show the answer. All other commands are functions.

`keys.sends("remove ID", "DELETE /account/keys/{id}", "Revoke a key.", done("Revoked {id}.", "revoked", "id"))`
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import click

from capsule_gateway.cli.arguments import WORDS
from capsule_gateway.cli.cells import Columns, Row, strip_controls
from capsule_gateway.cli.service import STEP_SECONDS, Service, open_service
from capsule_gateway.cli.show import as_json, as_list, show_json, show_line, show_table, show_value, wants_json

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
Show = Callable[..., None]  # takes the answer, and the command's arguments and options by name


class Answer(NamedTuple):
    """What a command expects of the service, and how it shows that."""

    having: str | None  # a field that the answer has; '': any object; None: the answer is ignored
    show: Show


class Group(click.Group):
    """Commands of which some are declared.

    They have a usage such as "create APP NAME --reason", and a call such as "POST /account/apps/{app} name". The words
    after the address are the fields of the body; `field=argument` sends an argument of another name. An optional
    argument that is missing is not sent. An option called `reason` is an operator's, for the audit trail.

    A group that has a command `list` runs it if none is named. `formerly` has names that commands had, with the present
    ones: they keep working, and neither help nor completion shows them.
    """

    def __init__(self, *arguments: Any, formerly: Mapping[str, str] = {}, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.formerly = formerly

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, self.formerly.get(cmd_name, cmd_name))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        begins_with_option = bool(args) and args[0].startswith("-") and args[0] not in ctx.help_option_names
        if "list" in self.commands and (begins_with_option or not (args or ctx.resilient_parsing)):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def list_topics(self, ctx: click.Context) -> Mapping[str, Iterable[str]]:
        """Returns the names of the commands under the headings of the help."""
        return {"Commands": self.list_commands(ctx)}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands with their whole descriptions, which click would cut."""
        for topic, names in self.list_topics(ctx).items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, each.get_short_help_str(sys.maxsize)) for name, each in found if each and not each.hidden]
            if rows:
                with formatter.section(topic):
                    formatter.write_dl(rows)

    def sends(
        self,
        usage: str,
        call: str,
        help: str | None,
        answer: Answer,
        *options: Decorator,
        check: Callable[[Service], object] | None = None,
        seconds: float = STEP_SECONDS,
        fixed: Mapping[str, Any] = {},
    ) -> None:
        """Adds a command, which calls `check` first, and waits so many seconds for the answer.

        `fixed` are fields of the body that no argument changes.
        """
        method, address, *fields = call.split()
        sources = {field: source or field for field, _, source in (each.partition("=") for each in fields)}

        def run(**values: Any) -> None:
            service, target = open_service(values.get("reason")), _fill_in(address, values)
            if check is not None:
                check(service)
            given = {field: values[source] for field, source in sources.items() if values[source] is not None}
            body = {**given, **fixed}
            sent = body if sources or fixed else None
            if answer.having is None:
                service.send(method, target, sent, seconds=seconds)
                return answer.show({}, **values)
            answer.show(service.request_object(method, target, sent, having=answer.having, seconds=seconds), **values)

        self._declare(usage, help, run, *options, as_json)

    def shows(self, usage: str, call: str, having: str = "id", *options: Decorator) -> Callable[[Show], Show]:
        """Adds a command whose help is the docstring of the decorated function, which shows the answer to people.

        The function then follows --json, so that other commands with the same answer can show it too.
        """

        def add(show: Show) -> Show:
            def show_answer(answer: Row, **values: Any) -> None:
                if wants_json():
                    return show_json(answer)
                show(answer, **values)

            self.sends(usage, call, show.__doc__, Answer(having, show_answer), *options)
            return show_answer

        return add

    def lists(self, usage: str, address: str, help: str, columns: Columns, *, empty: str, **layout: Any) -> None:
        """Adds a command that lists the rows at the address in a table."""

        def run(**values: str) -> None:
            rows = open_service().list_rows(_fill_in(address, values))
            show_table(rows, columns, empty=empty.format_map(values), **layout)

        self._declare(usage, help, run, as_list)

    def _declare(self, usage: str, help: str | None, run: Callable[..., None], *options: Decorator) -> None:
        name, *words = usage.split()
        for decorate in reversed([*(WORDS.get(word) or _make_argument(word) for word in words), *options]):
            run = decorate(run)
        self.command(name, help=help)(run)


def _make_argument(word: str) -> Decorator:
    return click.argument(word.lower(), metavar=word)


def _fill_in(address: str, values: dict[str, Any]) -> str:
    return address.format_map({name: quote(str(value), safe="") for name, value in values.items()})


# The next functions return how a command shows the answer. A text may name arguments, options and fields of the answer.


class _Known(dict[str, Any]):
    def __missing__(self, name: str) -> None:
        return None


def sentence(text: str, having: str = "id") -> Answer:
    def show(answer: Row, **values: Any) -> None:
        show_line(answer, strip_controls(text.format_map(_Known({**answer, **values}))))

    return Answer(having, show)


def done(text: str, field: str, argument: str = "") -> Answer:
    """Ignores the service's answer. With --json, prints an object with the argument, or true, in this field."""
    return Answer(None, lambda _, **values: sentence(text).show({field: values.get(argument, True)}, **values))


def value(field: str, note: str) -> Answer:
    """Prints only this field of the answer to stdout, and the note to stderr."""

    def show(answer: Row, **values: Any) -> None:
        show_value(answer, field, note.format_map(_Known({**answer, **values})))

    return Answer(field, show)
