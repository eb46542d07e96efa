"""Declared commands send the call they name, and show its answer."""

from typing import Any

import pytest
from click.testing import CliRunner

from capsule_gateway.cli import commands
from capsule_gateway.cli.cells import Row, text_of, texts
from capsule_gateway.cli.commands import Answer, Group, done, sentence, value
from capsule_gateway.cli.show import show_fields

ANSWER = {"id": "key_1", "key": "csk_new", "name": "laptop"}


class Recorder:
    """In the place of the service: keeps the calls, and answers with one object."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.reason: str | None = None

    def open(self, reason: str | None = None) -> "Recorder":
        self.reason = reason
        return self

    def request_object(self, method: str, path: str, body: Any, *, having: str, seconds: float) -> Row:
        self.calls.append((method, path, body, having))
        return ANSWER

    def send(self, method: str, path: str, body: Any, *, seconds: float) -> None:
        self.calls.append((method, path, body))

    def list_rows(self, path: str) -> list[Row]:
        self.calls.append(("GET", path))
        return []


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(commands, "open_service", recorder.open)
    return recorder


@pytest.fixture
def group() -> Group:
    return Group("keys", help="Manage keys.")


def run(group: Group, *arguments: str) -> tuple[str, str]:
    """Returns what a command prints to stdout and to stderr."""
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.strip(), result.stderr.strip()


def test_arguments_are_quoted_in_the_address_and_are_fields_of_the_body(service: Recorder, group: Group) -> None:
    group.sends("create ID NAME", "POST /accounts/{id}/keys label=name", "Create a key.", sentence("{name}: {key}"))
    assert run(group, "create", "a/b", "{id} \x1b[31m") == ("{id} [31m: csk_new", "")
    assert service.calls == [("POST", "/accounts/a%2Fb/keys", {"label": "{id} \x1b[31m"}, "id")]


def test_an_optional_argument_that_is_missing_is_not_sent(service: Recorder, group: Group) -> None:
    group.sends("rollback [ID]", "POST /rollback deployId=id", "Roll back.", sentence("{missing}", "key"))
    group.sends("ping", "POST /ping", "Ping.", sentence("pong"))
    assert run(group, "rollback")[0] == "None"
    run(group, "rollback", "")
    run(group, "rollback", "dep_1")
    run(group, "ping")
    assert [body for _, _, body, _ in service.calls] == [{}, {}, {"deployId": "dep_1"}, None]


def test_a_value_is_alone_on_stdout(service: Recorder, group: Group) -> None:
    group.sends("create NAME --reason", "POST /keys name", "Create a key.", value("key", "Created {id} for {name}:"))
    assert run(group, "create", "phone", "--reason", "lost") == ("csk_new", "Created key_1 for phone:")
    assert service.reason == "lost"
    assert service.calls == [("POST", "/keys", {"name": "phone"}, "key")]


def test_an_answer_that_is_ignored(service: Recorder, group: Group) -> None:
    group.sends("revoke ID", "DELETE /keys/{id}", "Revoke a key.", done("Revoked {id}.", "revoked", "id"))
    group.sends("clear", "DELETE /keys", "Revoke all keys.", done("Revoked all.", "cleared"))
    assert run(group, "revoke", "key_2")[0] == "Revoked key_2."
    assert run(group, "revoke", "key_2", "--json")[0] == '{"revoked": "key_2"}'
    assert run(group, "clear", "--json")[0] == '{"cleared": true}'


def test_a_function_shows_the_answer_to_people_only(service: Recorder, group: Group) -> None:
    @group.shows("show ID", "GET /keys/{id}", "key")
    def show(answer: Row, id: str) -> None:
        """Show a key."""
        show_fields(answer, {"id": id, "name": text_of("name")})

    assert run(group, "show", "key_3")[0].split() == ["id", "key_3", "name", "laptop"]
    assert run(group, "show", "key_3", "--json")[0].startswith('{"id": "key_1"')
    assert "Show a key." in run(group, "show", "--help")[0]


def test_a_check_comes_before_the_request(service: Recorder, group: Group) -> None:
    seen: list[int] = []
    answer = Answer(None, lambda _: None)
    group.sends("go", "POST /go", "Go.", answer, check=lambda _: seen.append(len(service.calls)))
    run(group, "go")
    assert (seen, service.calls) == ([0], [("POST", "/go", None)])


def test_a_list_without_rows(service: Recorder, group: Group) -> None:
    group.lists("list APP", "/apps/{app}/keys", "List keys.", texts("name"), empty="No keys of {app}.")
    assert run(group, "list", "shop")[0] == "No keys of shop."
    assert run(group, "list", "shop", "--json")[0] == "[]"
    assert service.calls == [("GET", "/apps/shop/keys")] * 2
