"""Shell completion, with a running gateway and without one."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import Exchange, FakeServer, Script, answer
from tests.support.accounts import App
from tests.support.command_line import Tool
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def complete_words(capsule: Tool, *words: str) -> list[str]:
    """Returns the values that bash gets. Each line of the output is a type and a value."""
    line = " ".join(["capsule", *words])
    asked = {"_CAPSULE_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    run = await capsule(**asked)
    assert not run.err
    return [value.partition(",")[2] for value in run.out.splitlines() if value]


async def test_names_and_ids(capsule: Tool, app: App) -> None:
    hook = (await capsule("hooks", "create", app.name, "--name", "ci", "--json")).json
    app.gateway.confidential.add(hook["url"].rpartition("/")[2])
    assert await complete_words(capsule, "deploys", "publish", app.name[:5]) == [app.name]
    assert await complete_words(capsule, "apps", "show", "nobodys") == []
    assert await complete_words(capsule, "hooks", "remove", "hook_") == [hook["id"]]
    assert await complete_words(capsule, "deploys", "show", "dep_") == []
    assert await complete_words(capsule, "new", "notes", "--template", "s") == ["static"]
    assert await complete_words(capsule, "keys", "re") == ["remove"]


ROWS: dict[str, Any] = {
    "/account/apps/shop/env": [{"name": "API_TOKEN"}, {"name": "API_URL"}, {"name": "OTHER"}],
    "/account/apps/shop/data": {"snapshots": [{"id": "snp_1"}, {"id": "snp_2"}], "state": "ok"},
    "/account/keys": [{"id": "key_1"}],
    "/account/members": [{"email": "ana@example.com"}, {"email": "bo@example.com"}],
    "/account/deliveries": [{"id": "evt_2"}, {"id": "evt_2"}, {"id": "evt_1"}],
    "/account/requests": [{"id": "0a1b"}],
    "/account/deploys": [{"id": "dep_1"}],
}


class Service(FakeServer):
    def script(self, exchange: Exchange) -> Script:
        return answer(200, ROWS[exchange.path.partition("?")[0]])


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("env remove shop API_", ["API_TOKEN", "API_URL"]),
        ("env remove shop API_URL API_T", ["API_TOKEN"]),
        ("env set shop O", ["OTHER"]),
        ("data restore shop snp", ["snp_1", "snp_2"]),
        ("data download shop snp_2", ["snp_2"]),
        ("keys remove k", ["key_1"]),
        ("keys revoke k", ["key_1"]),
        ("members remove a", ["ana@example.com"]),
        ("members set b", ["bo@example.com"]),
        ("deliveries show evt", ["evt_2", "evt_1"]),
        ("deliveries redeliver evt_1", ["evt_1"]),
        ("requests 0", ["0a1b"]),
        ("deploys rollback shop dep", ["dep_1"]),
        ("deploys cancel dep", ["dep_1"]),
    ],
)
async def test_what_an_account_has(words: str, offered: list[str], tmp_path: Path) -> None:
    async with Service() as service:
        assert await complete_words(Tool(service.address, "csk_key", tmp_path), *words.split()) == offered


async def test_an_answer_that_cannot_be_read(tmp_path: Path) -> None:
    """Its rows may be missing, or be no rows: the line being typed is not disturbed."""
    unreadable: list[Any] = [{"snapshots": None}, {"snapshots": ["x"]}, {}, []]
    for found in unreadable:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ROWS, "/account/apps/shop/data", found)
            async with Service() as service:
                tool = Tool(service.address, "csk_key", tmp_path)
                assert await complete_words(tool, "data", "restore", "shop", "s") == []


async def test_without_a_service_or_a_key(app: App, tmp_path: Path) -> None:
    for url, key in ((f"http://127.0.0.1:{free_port()}", app.account.key), (app.gateway.address, "")):
        assert await complete_words(Tool(url, key, tmp_path), "apps", "show", "a") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_the_script_of_a_shell(capsule: Tool, shell: str) -> None:
    script = (await capsule("completion", shell)).out
    assert f"_CAPSULE_COMPLETE={shell}_complete" in script
    assert (await capsule("completion", SHELL=f"/usr/bin/{shell}")).out == script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


async def test_an_unknown_shell(capsule: Tool) -> None:
    for shell in ("/bin/tcsh", None):
        assert await capsule.refused("completion", code=2, SHELL=shell) == (
            "name the shell: capsule completion bash|zsh|fish"
        )
