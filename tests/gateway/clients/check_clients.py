"""Well-known clients ask as their users write it: a whole answer, a stream, and a tool's round trip.

The newest release of each is installed into a folder of its own, which is kept for a day, so what a release changes is
noticed. docs/clients.md names what must be set. `make check-clients` prints the versions.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs import pages
from tests.fakes import FakeProvider
from tests.fakes.provider import call_part, calls, tokens
from tests.support.accounts import App
from tests.support.prices import cost

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

PROGRAMS = Path(__file__).parent / "programs"
CACHE = Path.home() / ".cache" / "capsule-clients"
INSTALL_SECONDS, ASK_SECONDS, KEPT_SECONDS = 600, 120, 86_400


class Client(NamedTuple):
    program: str
    packages: tuple[str, ...]  # the first one is the client

    @property
    def in_node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = {
    "OpenAI for Python": Client("openai_python.py", ("openai",)),
    "LangChain for Python": Client("langchain_python.py", ("langchain-openai", "langchain")),
    "LiteLLM as a client": Client("litellm_python.py", ("litellm",)),
    "Pydantic AI": Client("pydantic_ai_python.py", ("pydantic-ai-slim[openai]",)),
    "LlamaIndex": Client("llama_index_python.py", ("llama-index-llms-openai-like",)),
    "OpenAI Agents SDK": Client("openai_agents_python.py", ("openai-agents",)),
    "OpenAI for Node": Client("openai_node.mjs", ("openai",)),
    "Vercel AI SDK": Client("ai_sdk.mjs", ("@ai-sdk/openai-compatible", "ai", "zod")),
    "LangChain for JavaScript": Client(
        "langchain_node.mjs", ("@langchain/openai", "langchain", "@langchain/core", "zod")
    ),
    # As they are without further settings: they speak the Responses API.
    "Responses with OpenAI for Python": Client("responses_python.py", ("openai",)),
    "Responses with OpenAI for Node": Client("responses_node.mjs", ("openai",)),
    "Responses with the OpenAI Agents SDK": Client("responses_agents_python.py", ("openai-agents",)),
    "Responses with the Vercel AI SDK": Client("responses_ai_sdk.mjs", ("@ai-sdk/openai", "ai", "zod")),
}
INSTRUCTOR = Client("instructor_python.py", ("instructor",))


async def run(*command: str, seconds: float, folder: Path, **given: str) -> str:
    """Returns the output of a command, which has the machine's variables, such as those of a registry."""
    done = await pages.run(*command, folder=folder, seconds=seconds, **{**os.environ, **given})
    assert done.code == 0, (done.out + done.err)[-3_000:]
    return done.out


async def install(client: Client) -> Path:
    """Returns a folder with the packages."""
    digest = hashlib.sha256(" ".join([sys.version, *client.packages]).encode()).hexdigest()[:12]
    folder = CACHE / f"{Path(client.program).stem}-{digest}"
    if folder.exists() and time.time() - folder.stat().st_mtime > KEPT_SECONDS:
        shutil.rmtree(folder)
    if not folder.exists():
        fresh = folder.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        if client.in_node:
            quiet = ("--no-audit", "--no-fund", "--silent")
            await run("npm", "install", *quiet, *client.packages, seconds=INSTALL_SECONDS, folder=fresh)
        else:
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir")
            await run(*pip, "--target", str(fresh), *client.packages, seconds=INSTALL_SECONDS, folder=fresh)
        fresh.rename(folder)
    return folder


def read_version(client: Client, folder: Path) -> str:
    name = client.packages[0].partition("[")[0]
    if client.in_node:
        return str(json.loads((folder / "node_modules" / name / "package.json").read_text())["version"])
    [found] = folder.glob(f"{name.replace('-', '_')}-*.dist-info")
    return found.name.removesuffix(".dist-info").rpartition("-")[2]


async def ask(client: Client, app: App, **questions: str) -> list[str]:
    folder = await install(client)
    print(f"{client.packages[0]} {read_version(client, folder)}")
    given = {"AI_URL": app.gateway.address + app.path, "USER_TOKEN": app.token(), **questions}
    program = PROGRAMS / client.program
    if client.in_node:
        program = Path(shutil.copy(program, folder))  # it finds packages beside it
    command = ("node" if client.in_node else sys.executable, str(program))
    out = await run(*command, seconds=ASK_SECONDS, folder=folder, PYTHONPATH=str(folder), **given)
    answers: list[str] = json.loads(out.splitlines()[-1])
    return answers


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client(app: App, provider: FakeProvider, name: str) -> None:
    question, result = provider.plays(tokens("Half", " past.")), provider.plays(tokens("It", " rains."))
    arguments = [call_part(0, id="call_1", name="weather", arguments='{"city": '), call_part(0, arguments='"Zürich"}')]
    tool_question = provider.plays(calls(*arguments))
    said = await ask(CLIENTS[name], app, QUESTION=question, TOOL_QUESTION=tool_question, TOOL_RESULT=result)
    assert said == ["Half past.", "Half past.", "Zürich", "It rains."]
    [exchange] = provider.asked(result)
    *_, assistant, tool = exchange.json["messages"]
    [call] = assistant["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich"}
    assert (tool["role"], tool["tool_call_id"]) == ("tool", call["id"])
    assert await app.account.settled() == 3 * cost(7, 3) + cost(9, 4)


async def test_instructor(app: App, provider: FakeProvider) -> None:
    """Answers that fit a schema: as JSON, in part, and as a tool's arguments."""
    call = [call_part(0, id="call_1", name="Weather", arguments='{"city": "Zürich"}')]
    by_tool, by_json = provider.plays(calls(*call)), provider.plays(tokens('{"city": ', '"Zürich"}'))
    assert await ask(INSTRUCTOR, app, TOOL_QUESTION=by_tool, JSON_QUESTION=by_json) == ["Zürich"] * 3
