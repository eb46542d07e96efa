"""Shell completion, with a service and without one."""

import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.capsule_gateway.cli.conftest import Service
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


ROWS: dict[str, Any] = {
    "/account/apps": [{"name": "shop"}, {"name": "notes"}],
    "/account/hooks": [{"id": "hook_1"}],
    "/account/apps/shop/env": [{"name": "API_TOKEN"}, {"name": "API_URL"}, {"name": "OTHER"}],
    "/account/apps/shop/data": {"snapshots": [{"id": "snp_1"}, {"id": "snp_2"}], "state": "ok"},
    "/account/keys": [{"id": "key_1"}],
    "/account/members": [{"email": "ana@example.com"}, {"email": "bo@example.com"}],
    "/account/deliveries": [{"id": "evt_2"}, {"id": "evt_2"}, {"id": "evt_1"}],
    "/account/requests": [{"id": "0a1b"}],
    "/account/deploys": [{"id": "dep_1"}],
}


@pytest.fixture
def complete(stubbed: Tool, service: Service) -> Callable[[str], Awaitable[list[str]]]:
    service.answers = {f"GET {path}": rows for path, rows in ROWS.items()}
    return lambda words: complete_words(stubbed, *words.split())


async def test_what_an_account_has(complete: Callable[[str], Awaitable[list[str]]]) -> None:
    for words, offered in (
        ("deploys publish sh", ["shop"]),
        ("apps show nobodys", []),
        ("hooks remove hook_", ["hook_1"]),
        ("new notes --template s", ["static"]),
        ("keys re", ["remove"]),
        ("env remove shop API_", ["API_TOKEN", "API_URL"]),
        ("env remove shop API_URL API_T", ["API_TOKEN"]),
        ("env set shop O", ["OTHER"]),
        ("data restore shop snp", ["snp_1", "snp_2"]),
        ("data download shop snp_2", ["snp_2"]),
        ("keys revoke k", ["key_1"]),
        ("members remove a", ["ana@example.com"]),
        ("members set b", ["bo@example.com"]),
        ("deliveries show evt", ["evt_2", "evt_1"]),
        ("requests 0", ["0a1b"]),
        ("deploys rollback shop dep", ["dep_1"]),
        ("deploys cancel dep", ["dep_1"]),
    ):
        assert await complete(words) == offered, words


async def test_without_a_service_or_a_key_or_with_an_answer_that_cannot_be_read(
    complete: Callable[[str], Awaitable[list[str]]], service: Service, tmp_path: Path
) -> None:
    """Rows may be missing, or be no rows: the line being typed is not disturbed."""
    unreadable: list[Any] = [{"snapshots": None}, {"snapshots": ["x"]}, {}, []]
    for found in unreadable:
        service.answers["GET /account/apps/shop/data"] = found
        assert await complete("data restore shop s") == []
    for url, key in ((f"http://127.0.0.1:{free_port()}", "csk_key"), (service.address, "")):
        assert await complete_words(Tool(url, key, tmp_path), "apps", "show", "s") == []


async def test_the_script_of_a_shell(offline: Tool) -> None:
    for shell in ("bash", "zsh", "fish"):
        script = (await offline("completion", shell)).out
        assert f"_CAPSULE_COMPLETE={shell}_complete" in script
        assert (await offline("completion", SHELL=f"/usr/bin/{shell}")).out == script
        if shell == "bash":
            assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    for unknown in ("/bin/tcsh", None):
        said = await offline.refused("completion", code=2, SHELL=unknown)
        assert said == "name the shell: capsule completion bash|zsh|fish"
