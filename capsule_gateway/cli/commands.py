"""Declares commands that send one request and show the answer. Other commands are functions.

keys = Group("keys", help="Manage the account's API keys.")
keys.sends("revoke ID", "DELETE /account/keys/{id}", "Revoke a key.", done("Revoked {id}.", "revoked", "id"))
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import click

from capsule_gateway.cli.arguments import app_argument, deploy_argument, hook_argument
from capsule_gateway.cli.cells import Columns, Row, strip_controls
from capsule_gateway.cli.service import STEP_SECONDS, open_service
from capsule_gateway.cli.show import as_json, as_list, show_line, show_secret, show_table

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
Values = Mapping[str, Any]  # of the command's arguments and options

# Words of a usage. Every other word, such as NAME, is a plain argument.
ARGUMENTS = {
    "APP": app_argument,
    "ACCOUNT": click.argument("account", metavar="ID"),
    "DEPLOY": deploy_argument,
    "HOOK": hook_argument,
}


class Answer(NamedTuple):
    """What a command expects of the service, and how it shows that."""

    having: str | None  # a field that the answer has; '': any object; None: the answer is ignored
    show: Callable[[Values, Row], None]


class Group(click.Group):
    """Commands of which some are declared."""

    def sends(
        self, usage: str, call: str, help: str, answer: Answer, *options: Decorator, seconds: float = STEP_SECONDS
    ) -> None:
        """Adds a command such as "create APP NAME", which sends a call such as "POST /account/apps/{app}/hooks name".

        The words after the address are the fields of the body. `field=argument` sends an argument of another name. An
        optional argument that is missing is not sent. An option called `reason` is an operator's, for the audit trail.
        """
        method, address, *fields = call.split()
        sources = {field: source or field for field, _, source in (each.partition("=") for each in fields)}

        def run(**values: Any) -> None:
            service, target = open_service(values.get("reason")), _fill_in(address, values)
            body = {field: values[source] for field, source in sources.items() if values[source] is not None}
            sent = body if sources else None
            if answer.having is None:
                service.send(method, target, sent, seconds=seconds)
                return answer.show(values, {})
            answer.show(values, service.request_object(method, target, sent, having=answer.having, seconds=seconds))

        self._declare(usage, help, run, *options, as_json)

    def lists(self, usage: str, address: str, help: str, table: Callable[[Values, list[Row]], None]) -> None:
        """Adds a command that lists the rows at the address."""

        def run(**values: str) -> None:
            table(values, [*open_service().list_rows(_fill_in(address, values))])

        self._declare(usage, help, run, as_list)

    def _declare(self, usage: str, help: str, run: Callable[..., None], *options: Decorator) -> None:
        name, *words = usage.split()
        arguments = [ARGUMENTS.get(word) or _make_argument(word) for word in words]
        for decorate in reversed([*arguments, *options]):
            run = decorate(run)
        self.command(name, help=help)(run)


def _make_argument(word: str) -> Decorator:
    return click.argument(word.strip("[]").lower(), metavar=word, required=not word.startswith("["))


def _fill_in(address: str, values: Values) -> str:
    return address.format(**{name: quote(str(value), safe="") for name, value in values.items()})


class _Known(dict[str, Any]):
    def __missing__(self, name: str) -> None:
        return None


# The next functions return how a command shows the answer. A text may name arguments, options and fields of the answer.


def line(text: str, having: str = "id") -> Answer:
    def show(values: Values, answer: Row) -> None:
        show_line(answer, strip_controls(text.format_map(_Known({**answer, **values}))))

    return Answer(having, show)


def done(text: str, field: str, argument: str = "") -> Answer:
    """Ignores the service's answer. With --json, the answer is the argument (or true) in this field."""
    return Answer(None, lambda values, _: line(text).show(values, {field: values.get(argument, True)}))


def secret(field: str, note: str) -> Answer:
    """Prints only this field of the answer to stdout."""
    return Answer(
        field, lambda values, answer: show_secret(answer, field, note.format_map(_Known({**answer, **values})))
    )


def table(columns: Columns, *, empty: str, **layout: Any) -> Callable[[Values, list[Row]], None]:
    return lambda values, rows: show_table(rows, columns, empty=empty.format_map(values), **layout)
