"""Every example of docs/clients.md runs against a gateway, and each client handles refusals as the page describes."""

import asyncio
import gc
import json
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ProviderFailed
from tests.browser import packages
from tests.docs.pages import DOCS, Section, run, run_shell, sections
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import COMPLETIONS, ROLE, chunk
from tests.fakes.server import CLOSE, answer
from tests.gateway.clients.check_clients import CLIENTS
from tests.support.accounts import Account, App
from tests.support.gateway_process import Gateway
from tests.support.pages import find_table, read_page
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODULE = "The browser module"
IN_NODE = {MODULE, "OpenAI for Node and browsers", "Vercel AI SDK", "fetch"}
IN_PYTHON = {"OpenAI for Python", "LangChain"}
ASK_AGAIN = {"OpenAI for Python", "LangChain", "OpenAI for Node and browsers", "Vercel AI SDK", "curl"}

ANSWER = "".join(COMPLETIONS)
TOO_LONG = {"error": {"message": "no", "type": "invalid_request_error", "code": "context_length_exceeded"}}
EXPECTED = {
    "answered": [ANSWER, None],
    "rate limit": ["", "Try again in 1 seconds."],
    "cap": ["", "Today's budget is used up."],
    "refused": ["", "The request is longer than the model's context; shorten the prompt, or leave out older messages."],
    "broken off": ["Half", ProviderFailed.message],
}
THROWS = {  # at the rate limit, and if the provider refuses
    MODULE: ("AiError", "AiError"),
    "OpenAI for Python": ("RateLimitError", "BadRequestError"),
    "LangChain": ("RateLimitError", "BadRequestError"),
    "OpenAI for Node and browsers": ("RateLimitError", "BadRequestError"),
    "Vercel AI SDK": ("RetryError", "APICallError"),
    "fetch": ("Object", "Object"),
}
Questions = dict[str, dict[str, str]]


class Visitor:
    """Asks through one client. Questions that an app's limits refuse each have an app of their own."""

    def __init__(self, client: str, account: Account, backend: FakeAppBackend, provider: FakeProvider) -> None:
        self.client, self._account, self._backend, self._provider = client, account, backend, provider
        self.apps: dict[str, App] = {}
        self.prompts = {
            "refused": provider.plays(answer(400, TOO_LONG)),
            "broken off": provider.plays([ROLE, chunk("Half"), CLOSE]),
        }

    async def questions(self) -> Questions:
        for name, limits in (("answered", {}), ("rate limit", {"requestsPerMinute": 0}), ("cap", {"dailyEuro": "0"})):
            self.apps[name] = await self._limited_app(limits)
        return {name: self._question(name) for name in EXPECTED}

    async def _limited_app(self, limits: dict[str, Any]) -> App:
        app = await self._account.app(self._backend)
        set_ = await self._account.call("PUT", f"/account/apps/{app.name}/limits", limits)
        assert set_.status_code == 200, set_.text
        return app

    def _question(self, name: str) -> dict[str, str]:
        app = self.apps.get(name, self.apps["answered"])
        prompt = self.prompts.get(name) or f"prompt {secrets.token_hex(8)}"
        return {"url": app.gateway.address + app.path, "token": app.token(), "prompt": prompt}

    async def asked_as_often_as_the_page_says(self) -> None:
        """Checks that the client repeated only refusals that may pass."""
        times = 3 if self.client in ASK_AGAIN else 1
        await wait_until(lambda: self._count("rate limit", times))
        await wait_until(lambda: self._count("cap", 1))
        assert [len(self._provider.asked(prompt)) for prompt in self.prompts.values()] == [1, 1]

    async def _count(self, name: str, times: int) -> bool:
        listed = await self._account.get(f"/account/requests?app={self.apps[name].name}")
        return len(listed.json()) == times


async def ask_in_node(clients: dict[str, tuple[Section, Questions]], folder: Path) -> dict[str, dict[str, Any]]:
    packages.require("ai/package.json")
    (folder / "node_modules").symlink_to(packages.HERE / "node_modules")
    (folder / "lib").mkdir()
    module = (DOCS.parent / "capsule/lib/ai.js").read_text()
    assert "import.meta.env" in module
    (folder / "lib/ai.js").write_text(module.replace("import.meta.env", "globalThis.build"))
    (folder / "lib/auth.js").write_text("export const getToken = async () => globalThis.build.token;")
    (folder / "package.json").write_text('{"type": "module"}')
    given = {}
    for number, (name, (section, questions)) in enumerate(clients.items()):
        file = folder / f"client{number}.js"
        file.write_text(section.take("js"))
        given[name] = {"file": str(file), "questions": questions}
    done = await run("node", str(Path(__file__).parent / "clients.mjs"), folder=folder, given=json.dumps(given))
    assert done.code == 0, done.err
    return json.loads(done.out)


def ask_in_python(client: dict[str, Any], question: dict[str, str]) -> list[str | None]:
    """Asks as `clients.mjs` does."""
    import openai  # large, and each test process imports every module

    shown = ""
    parts: Iterator[str] = client["ask"](question["url"], question["token"], question["prompt"])
    try:
        for part in parts:
            shown += part
    except openai.APIError as error:
        return [shown, client["explain"](error), [each.__name__ for each in type(error).__mro__]]
    return [shown, None, []]


@pytest.fixture
def collected() -> Iterator[None]:
    """Ends the connections of the page's clients, which nobody closes, before another test would collect them."""
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


@pytest.mark.usefixtures("collected")
async def test_sdks_and_pages(
    account: Account, backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    page = sections("clients.md", {})
    visitors = {name: Visitor(name, account, backend, provider) for name in IN_NODE | IN_PYTHON}
    asked = {name: await visitor.questions() for name, visitor in visitors.items()}
    in_node = asyncio.create_task(ask_in_node({name: (page[name], asked[name]) for name in IN_NODE}, tmp_path))
    explain: dict[str, Any] = {}  # LangChain's errors are those of OpenAI's SDK
    clients = {}
    for name in sorted(IN_PYTHON, reverse=True):
        clients[name] = explain = {**explain}
        exec(compile(page[name].take("python"), name, "exec"), explain)
    waits = [
        asyncio.to_thread(ask_in_python, clients[name], question)
        for name in IN_PYTHON
        for question in asked[name].values()
    ]
    said = iter(await asyncio.gather(*waits))
    answers = {name: {question: next(said) for question in asked[name]} for name in IN_PYTHON}
    answers |= await in_node
    for name, visitor in visitors.items():
        assert {question: said[:2] for question, said in answers[name].items()} == EXPECTED, name
        for question, error in zip(("rate limit", "refused"), THROWS[name], strict=True):
            assert error in answers[name][question][2], name
        await visitor.asked_as_often_as_the_page_says()
        assert not page[name].left, name
    assert page.keys() - visitors.keys() == {"Clients", "curl"}


async def test_curl(
    gateway: Gateway, account: Account, backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    demo = {"account": account.id, "auth": {"kind": "jwks", "url": backend.jwks_url}}
    assert (await gateway.platform("PUT", "apps/demo", demo)).is_success
    page = sections("clients.md", {"http://localhost:8000": gateway.address})
    (tmp_path / ".capsule").mkdir()
    (tmp_path / ".capsule" / "user-token").write_text(backend.token())  # as `make run` does
    sign_in, curl = page["Clients"].take("sh"), page["curl"]
    blocks = whole, stream, *_ = [curl.take("sh") for _ in range(4)]
    asked = [await run_shell(sign_in + block, tmp_path) for block in blocks]
    assert [done.code for done in asked] == [0, 0, 0, 0], asked
    assert json.loads(asked[0].out)["text"] == ANSWER
    assert f'data: {{"token":"{COMPLETIONS[0]}"}}\n\n' in asked[1].out
    assert "event: done\n" in asked[1].out
    assert json.loads(asked[2].out)["choices"][0]["message"]["content"] == ANSWER
    assert json.loads(asked[3].out)["output"][0]["content"][0]["text"] == ANSWER
    assert not page["Clients"].left + curl.left

    visitor = Visitor("curl", account, backend, provider)
    questions = await visitor.questions()

    async def refusal(name: str) -> str:
        question = questions[name]
        block = whole.replace("What is a capsule?", question["prompt"])
        done = await run_shell(block, tmp_path, AI_URL=question["url"], USER_TOKEN=question["token"])
        assert done.code == 22, done
        return done.out

    refusals = await asyncio.gather(*(refusal(name) for name in ("rate limit", "cap", "refused")))
    for code, said in zip(("APP_RATE_LIMITED", "APP_CAP_REACHED", "PROVIDER_REFUSED"), refusals, strict=True):
        assert f'"code":"{code}"' in said
    broken = questions["broken off"]
    block = stream.replace("What is a capsule?", broken["prompt"])
    done = await run_shell(block, tmp_path, AI_URL=broken["url"], USER_TOKEN=broken["token"])
    assert done.out.split("\n\n")[-2].startswith("event: error\n"), done
    await visitor.asked_as_often_as_the_page_says()


async def test_each_client_that_is_run_has_a_row() -> None:
    assert {*find_table(read_page("docs/clients.md"), "library")} == {*CLIENTS, "Instructor"}
