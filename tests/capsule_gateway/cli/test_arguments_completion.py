"""Shell completion, with a running gateway and without one."""

import subprocess
from pathlib import Path

import pytest

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
