"""The account's and the operators' commands, against a running gateway."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from capsule_gateway.cli.main import TOPICS
from tests.fakes.receiver import FakeReceiver, verified
from tests.fakes.server import answer
from tests.support.accounts import App
from tests.support.command_line import Tool, run_in_terminal, run_process
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOOK_URL = re.compile(r"http://127\.0\.0\.1:\d+/hooks/deploy/([\w-]{43})")


async def test_the_account(capsule: Tool, app: App) -> None:
    shown = (await capsule("account")).out
    for text in (
        app.account.id,
        "max",
        "0.00 of 10.00 EUR",
        "0 of 1000",
        "30 requests per app, 20 per user",
        "100 KB in, 2000 tokens out",
    ):
        assert text in shown
    assert (await capsule("account", "--json")).json["id"] == app.account.id


async def test_a_hooks_life(capsule: Tool, app: App) -> None:
    made = await capsule("hooks", "create", app.name, "--name", "nightly build")
    found = HOOK_URL.fullmatch(made.line)
    assert found
    app.gateway.confidential.add(found[1])
    assert made.err.count("\n") == 1
    assert "is shown only once" in made.err

    headings, row = (await capsule("hooks", "list")).rows
    assert headings == ["NAME", "ID", "APP", "CREATED", "LAST USED"]
    name, hook_id, app_name, created, used = row
    assert (name, app_name, created, used) == ("nightly build", app.name, "just now", "never")

    # The app was never live, so the trigger is refused. It still counts as a use of the hook.
    assert (await app.gateway.http.post(made.line)).status_code == 409
    listed = (await capsule("hooks", "list", "--json")).json
    assert [hook["id"] for hook in listed] == [hook_id]

    assert (await capsule("hooks", "remove", hook_id)).line == f"Revoked {hook_id}. Its URL now answers 404."
    assert (await app.gateway.http.post(made.line)).status_code == 404
    assert (await capsule("hooks", "list")).line == "No hooks. Create one with: capsule hooks create APP --name NAME"
    assert "NOT_FOUND" in await capsule.refused("hooks", "remove", hook_id)


async def test_a_hook_for_programs(capsule: Tool, app: App) -> None:
    made = (await capsule("hooks", "create", app.name, "--name", "ci", "--json")).json
    app.gateway.confidential.add(made["url"].rpartition("/")[2])
    assert made["name"] == "ci"
    assert (await capsule("hooks", "remove", made["id"], "--json")).json == {"revoked": made["id"]}


async def test_a_hook_needs_an_app_of_the_account(capsule: Tool) -> None:
    assert "no app somebody-elses" in await capsule.refused("hooks", "create", "somebody-elses", "--name", "x")


async def test_the_webhook(capsule: Tool, app: App) -> None:
    assert await capsule.refused("webhooks", "show") == "no webhook is set; set one with: capsule webhooks set URL"
    made = await capsule("webhooks", "set", "http://127.0.0.1:9/events")
    assert re.fullmatch(r"whsec_[\w+/]+=*", made.line)
    app.gateway.confidential.add(made.line)
    assert "is shown only once" in made.err
    again = await capsule("webhooks", "set", "http://127.0.0.1:9/events")
    assert again.line == "Events already go to this URL. The signing secret is unchanged."
    shown = (await capsule("webhooks", "show")).out
    assert "http://127.0.0.1:9/events" in shown
    assert "previous secret" not in shown
    rotated = await capsule("webhooks", "rotate")
    assert re.fullmatch(r"whsec_[\w+/]+=*", rotated.line)
    assert rotated.line != made.line
    app.gateway.confidential.add(rotated.line)
    assert "For 24 hours" in rotated.err
    assert "previous secret until" in (await capsule("webhooks", "show")).out
    assert (await capsule("webhooks", "remove")).line == "Cleared. Events are dropped until you set a webhook."
    for command in (["webhooks", "show"], ["webhooks", "rotate"], ["webhooks", "test", "app.crashed"]):
        assert "no webhook is set; set one with: capsule webhooks set URL" in await capsule.refused(*command)
    assert "http" in await capsule.refused("webhooks", "set", "ftp://example.com")


async def test_deliveries(capsule: Tool, app: App, tmp_path: Path) -> None:
    assert "No deliveries yet" in (await capsule("deliveries", "list")).line
    async with FakeReceiver() as receiver, Worker(app.gateway.redis.url, tmp_path):
        secret = (await capsule("webhooks", "set", receiver.url())).line
        app.gateway.confidential.add(secret)
        sent = (await capsule("webhooks", "test", "deploy.failed")).line
        first = re.search(r"evt_\w+", sent)
        assert first
        await wait_until(lambda: receiver.got(), 10)
        assert verified(receiver.got()[0], secret)["data"]["sample"] is True

        async def in_json(*command: str) -> list[dict[str, str]]:
            return (await capsule(*command, "--json")).json

        assert (await wait_until(lambda: in_json("deliveries", "list"), 10))[0]["id"] == first[0]
        headings, row = (await capsule("deliveries", "list")).rows
        assert headings == ["ID", "EVENT", "APP", "AT", "TOOK", "OUTCOME", "NOTES"]
        assert row[:3] == [first[0], "deploy.failed", app.name]
        assert row[-2:] == ["delivered", "sample"]
        assert first[0] in (await capsule("deliveries", "redeliver", first[0])).line
        await wait_until(lambda: receiver.ids()[first[0]] == 2, 10)
        receiver.plays("/events", answer(500, b"why\x1b[31m\nand more"))
        await capsule("webhooks", "test", "app.crashed")
        await wait_until(lambda: len(receiver.got()) == 3, 10)
        failed = ("deliveries", "list", "--outcome", "failed", "--type", "app.crashed", "--app", app.name)
        (row,) = await wait_until(lambda: in_json(*failed), 10)
        shown = (await capsule("deliveries", "show", row["attempt"])).out
        for part in (
            receiver.url(),
            "failed (status 500)",
            "X-Service-Event: app.crashed",
            "  why[31m\n  and more",
        ):
            assert part in shown
        assert secret not in shown
        page = await capsule("deliveries", "list", "--limit", "1")
        assert page.err == f"More: capsule deliveries list --limit 1 --before {row['attempt']}\n"
        page = await capsule(*failed, "--limit", "1")
        more = page.err.removeprefix("More: capsule ").split()
        assert {*failed, "--limit"} < {*more}
        assert (await capsule(*more)).line == "No such deliveries."  # the older ones were delivered
        assert [each["id"] for each in await in_json("deliveries", "list", "--before", row["attempt"])] == [
            first[0]
        ] * 2
        assert (await capsule("deliveries", "list", "--outcome", "dropped")).line == "No such deliveries."
        receiver.plays("/events")
        again = ("deliveries", "redeliver", "--failed", "--since")
        queued = (await capsule(*again, "1h")).line
        assert queued == "Queued 1 failed event again. See the outcome with: capsule deliveries list"
        await wait_until(lambda: len(receiver.got()) == 4, 10)
        assert "RATE_LIMITED, retry after" in await capsule.refused(*again, "2026-07-02T10:00:00Z")
        assert "sample, redelivery 1" in (await capsule("deliveries", "list", "--limit", "1")).out
        assert len((await capsule("deliveries", "list", "--since", "1h", "--json")).json) > 1
        assert (await capsule("deliveries", "list", "--until", "1h", "--json")).json == []
    for command in ("redeliver", "show"):
        assert "no delivery" in await capsule.refused("deliveries", command, "evt_unknown")


async def test_apps(capsule: Tool, app: App) -> None:
    headings, row = (await capsule("apps", "list")).rows
    assert headings == ["APP", "STATUS", "ADDRESS"]
    assert row == [app.name, "never-live", app.origin]


async def test_operators_accounts_and_apps(operator: Tool, gw: Gateway, tmp_path: Path) -> None:
    made = await operator("accounts", "create", "Vreni", "--plan", "maker")
    gw.confidential.add(made.line)
    assert made.line.startswith("csk_")
    found = re.search(r"acc_\w+", made.err)
    assert found
    assert (await operator("accounts", "plan", found[0], "max")).line == f"{found[0]} is now on the max plan."

    record = {"account": found[0], "customDomain": "shop.example.com", "build": {"command": "make", "output": "dist"}}
    (tmp_path / "app.json").write_text(json.dumps(record))
    shown = (await operator("apps", "put", "vrenis-shop", str(tmp_path / "app.json"))).out
    for text in ("vrenis-shop", found[0], "shop.example.com (not verified)", "command make, output dist"):
        assert text in shown
    assert (await operator("apps", "show", "vrenis-shop")).out == shown
    put = await operator("apps", "put", "vrenis-shop", "-", "--json", given=json.dumps({"account": found[0]}))
    assert put.json["customDomain"] is None
    assert "Deleted vrenis-shop" in (await operator("apps", "remove", "vrenis-shop", "--yes")).line
    assert "NOT_FOUND" in await operator.refused("apps", "show", "vrenis-shop")


async def test_a_record_that_is_not_json(operator: Tool) -> None:
    assert "is not JSON" in await operator.refused("apps", "put", "x", "-", given="{", code=2)


async def test_the_inference_switch(operator: Tool, gw: Gateway) -> None:
    assert "operational" in (await operator("inference", "status")).out
    try:
        off = await operator("inference", "off")
        assert re.search(r"^switch +off$", off.out, re.MULTILINE)
        assert (await operator("inference", "status", "--json")).json["managedInferenceStatus"] == "disabled"
    finally:
        assert "operational" in (await operator("inference", "on")).out


async def test_operator_commands_refuse_an_api_key(capsule: Tool) -> None:
    assert (await capsule.refused("inference", "off")).startswith("this is an account's API key; operators' commands")


async def test_account_commands_refuse_the_operator_token(operator: Tool) -> None:
    said = await operator.refused("usage")
    assert said.startswith("this command needs an account's API key, which begins with csk_; operators use 'capsule")
    assert "UNAUTHORIZED" in said


async def test_wrong_usage_is_one_line(capsule: Tool) -> None:
    for arguments, message in (
        (["hooks", "create", "shop"], "Missing option '--name' (see 'capsule hooks create --help')"),
        (["hooks", "remove"], "Missing argument 'ID' (see 'capsule hooks remove --help')"),
        (["hoks"], "No such command 'hoks'. (Did you mean one of: 'hooks', 'webhooks'?)"),
        (["webhooks", "test", "deploy.exploded"], "'deploy.exploded' is not one of"),
        (["deliveries", "list", "--limit", "0"], "0 is not in the range"),
        (["deliveries", "redeliver"], "give either the ID of an event, or --failed and --since"),
        (["deliveries", "redeliver", "evt_1", "--failed", "--since", "1h"], "give either the ID"),
        (["deliveries", "redeliver", "--failed"], "give either the ID"),
        (["deliveries", "redeliver", "--failed", "--since", "lately"], "'lately' is not a time"),
        (["deploys", "publish", "shop", "/nowhere/at/all"], "does not exist"),
        (["worker", "webhook"], "'webhook' is not one of 'webhooks', 'deploys', 'sites', 'monitors'"),
    ):
        assert message in await capsule.refused(*arguments, code=2)


async def test_a_group_alone_lists_or_shows_its_help(capsule: Tool, app: App) -> None:
    assert (await capsule("hooks")).line.startswith("No hooks.")
    assert (await capsule("apps", "--json")).json == (await capsule("apps", "list", "--json")).json
    assert (await capsule("keys", "-h")).out.startswith("Usage: capsule keys [OPTIONS] COMMAND")
    run = await asyncio.to_thread(run_process, capsule, "webhooks")
    assert run.returncode == 2
    assert "Usage: " in run.stderr
    assert "rotate" in run.stderr


async def test_the_help_has_each_command_under_its_topic(capsule: Tool) -> None:
    page = (await capsule("--help")).out
    for topic, commands in TOPICS.items():
        section = page.partition(f"\n{topic}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\S+)", section, re.MULTILINE) == [*commands], topic
        for name in commands:
            assert (await capsule(name, "-h")).out.startswith(f"Usage: capsule {name}")
    assert "..." not in page.partition("Start here:")[2], "a description is cut"
    assert "hook " not in page


async def test_former_names_still_work(capsule: Tool, app: App) -> None:
    created = await capsule("hook", "create", app.name, "--name", "ci")
    app.gateway.confidential.add(created.line.rpartition("/")[2])
    [hook] = (await capsule("hook", "list", "--json")).json
    assert (await capsule("hook", "revoke", hook["id"])).line == f"Revoked {hook['id']}. Its URL now answers 404."
    assert "no webhook is set" in await capsule.refused("webhook", "show")
    assert (await capsule("webhook", "clear")).line.startswith("Cleared.")
    for former in ("keys revoke", "env unset", "apps delete", "domain clear", "accounts key", "accounts delete"):
        assert (await capsule(*former.split(), "-h")).out.startswith(f"Usage: capsule {former} ")


@pytest.mark.parametrize(
    ("command", "former", "present"),
    [
        ("apps list", "-o json", "--format json"),
        ("apps list", "--output csv", "--format csv"),
        ("requests", "--from 1h --to 30m", "--since 1h --until 30m"),
        ("apps set", "--output dist", "--output-dir dist"),
    ],
)
async def test_former_options_still_work(capsule: Tool, app: App, command: str, former: str, present: str) -> None:
    words = [*command.split(), *([app.name] if command == "apps set" else [])]
    run = await capsule(*words, *former.split())
    assert (run.code, run) == (0, await capsule(*words, *present.split()))
    page = (await capsule(*command.split(), "-h")).out
    for option in former.split()[::2]:
        assert not re.search(rf"{option}[ ,]", page)


async def test_an_error_names_what_was_typed(capsule: Tool, app: App) -> None:
    assert (await capsule.refused("limits", "set", app.name, "--daily-euro", "abc")).startswith("--daily-euro: ")
    assert (await capsule.refused("deploys", "rollback", app.name, "dep_x")).startswith("ID: ")
    assert (await capsule.refused("domains", "set", app.name, "nothing")).startswith("DOMAIN: ")
    assert (await capsule.refused("apps", "set", app.name, "--build", "x", "--output-dir", "../x")).startswith(
        "--output-dir: "
    )


async def test_an_unknown_app_is_repeated(capsule: Tool, app: App) -> None:
    near = f"{app.name}s"
    said = f"There is no app {near} in this account (did you mean {app.name}?) (NOT_FOUND, request "
    assert (await capsule.refused("limits", "show", near)).startswith(said)
    assert (await capsule.refused("env", "list", "zzzzz")).startswith(
        "There is no app zzzzz in this account (NOT_FOUND"
    )


async def test_a_pipe_gets_whole_lines_without_colors(capsule: Tool, app: App) -> None:
    run = await asyncio.to_thread(run_process, capsule, "apps", "list")
    assert "\x1b" not in run.stdout
    row = [app.name, "never-live", app.origin]
    assert [line.split() for line in run.stdout.splitlines()] == [["APP", "STATUS", "ADDRESS"], row]
    assert all(line == line.rstrip() for line in run.stdout.splitlines())


async def test_a_narrow_terminal_cuts_no_address(capsule: Tool, app: App) -> None:
    seen = await asyncio.to_thread(run_in_terminal, capsule, "apps", "list", columns=20)
    assert app.origin in seen
    assert "\x1b[" in seen
    assert "\x1b" not in await asyncio.to_thread(run_in_terminal, capsule, "apps", "list", NO_COLOR="1")


async def test_shell_completion(capsule: Tool) -> None:
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "capsule_gateway"],
        env={
            "PATH": os.environ["PATH"],
            "_CAPSULE_COMPLETE": "bash_complete",
            "COMP_WORDS": "capsule keys r",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "plain,remove"


async def test_whose_key_it_is(capsule: Tool, operator: Tool, app: App) -> None:
    shown = (await capsule("whoami")).line
    assert app.account.id in shown
    assert shown.endswith(f"at {app.gateway.address}, on the plan max")
    assert (await capsule("whoami", "--json")).json["id"] == app.account.id
    assert (await operator("whoami")).line == f"An operator at {app.gateway.address}"
    assert "UNAUTHORIZED" in await Tool(app.gateway.address, "csk_wrong", capsule.home).refused("whoami")


async def test_lists_for_programs(capsule: Tool, app: App) -> None:
    rows = (await capsule("apps", "list", "--format", "json")).json
    assert [row["name"] for row in rows] == [app.name]
    heading, line = (await capsule("apps", "list", "--format", "csv")).out.splitlines()
    assert dict(zip(heading.split(","), line.split(","), strict=False))["name"] == app.name
    assert (await capsule("apps", "list", "--format", "table")).out == (await capsule("apps", "list")).out
    assert "give either --json or --format" in await capsule.refused(
        "keys", "list", "--json", "--format", "csv", code=2
    )
    for command in ("keys list", "hook list", "deliveries list", "deploys list", "requests", "usage", "data deleted"):
        assert (await capsule(*command.split(), "--format", "json")).json is not None
        assert (await capsule(*command.split(), "--format", "csv")).code == 0


@pytest.mark.parametrize("arguments", [["--version"], ["-h"], ["deploys", "list", "-h"], ["completion", "zsh"]])
async def test_a_start_imports_only_what_it_needs(arguments: list[str]) -> None:
    """Each of these takes longer than the rest of the start."""
    heavy = ("aiohttp", "dotenv", "httpx", "litestar", "mcp", "redis", "rich.table", "workers")
    code = (
        "import sys; from capsule_gateway.cli.main import main\n"
        f"try: main({arguments!r})\nfinally: print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    run = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr.strip()) == (0, "[]")
