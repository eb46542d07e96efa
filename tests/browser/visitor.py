"""An app's site, served as a host does with a fake sign-in, and its page, whose script calls the module."""

import json
import mimetypes
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

from tests.fakes.server import Exchange, FakeServer, Script, answer
from tests.support.gateway_process import DOMAIN
from tests.support.programs import require

MODULE = Path(__file__).parents[2] / "capsule"
BROWSERS = ["chromium-headless-shell", "chromium", "google-chrome"]  # the first needs half the processor time
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# `ask` returns the result of a call: the value it resolved to, or the error it was rejected with.
SCRIPT = """
window.ask = async (prompt, { stop, onToken, onDone, effort, whole } = {}) => {
  window.tokens = [];
  const { AiError, complete, streamComplete } = await import("/lib/ai.js");
  try {
    const seen = onToken ?? ((token) => void window.tokens.push(token));
    const text = whole
      ? complete(prompt, { effort })
      : streamComplete(prompt, seen, { signal: stop?.signal, onDone, effort });
    return { text: await text, tokens: window.tokens };
  } catch (error) {
    const { name, message, code, status, retryAfter, requestId } = error;
    const known = error instanceof AiError;
    return { error: { name, message, code, status, retryAfter, requestId, known }, tokens: window.tokens };
  }
};
"""


class Site(FakeServer):
    """The app's site. `env` are the variables of its build; with None, the module is served as it is in the folder."""

    def __init__(self) -> None:
        super().__init__()
        self.env: dict[str, str] | None = {}
        self.token: str | None = None

    def script(self, exchange: Exchange) -> Script:
        path = exchange.path.lstrip("/")
        if path == "session":
            return answer(200, {"token": self.token}) if self.token else answer(503)
        if path == "blank":
            return _file("text/html", b"<!doctype html><title>An app</title>")
        file = MODULE / path
        if not file.is_file():
            return answer(404)
        content = file.read_bytes()
        if path == "lib/ai.js" and self.env is not None:
            content = b"import.meta.env = %b; %b" % (json.dumps(self.env).encode(), content)
        return _file(mimetypes.guess_type(file.name)[0] or "text/plain", content)


class Folder(FakeServer):
    """Serves the files of a built app, and the tokens of its backend."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.token = folder, ""

    def script(self, exchange: Exchange) -> Script:
        if exchange.path == "/token":
            return answer(200, {"token": self.token})
        file = self.folder / (exchange.path.lstrip("/") or "index.html")
        if not file.is_file():
            return answer(404)
        return answer(200, file.read_bytes(), {"Content-Type": mimetypes.guess_type(file.name)[0] or "text/plain"})


def _file(kind: str, content: bytes) -> Script:
    return answer(200, content, {"Content-Type": f"{kind}; charset=utf-8"})


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    path = os.environ.get("CHROMIUM") or require(*BROWSERS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=QUIET)
        yield browser
        await browser.close()


@dataclass
class Answer:
    """The result of a call. `error` has the fields of an AiError; its `known` says whether it is one."""

    text: str | None
    tokens: list[str]
    error: dict[str, Any] | None

    def __getattr__(self, name: str) -> Any:
        """Returns a field of the error, or None without one."""
        return (self.error or {}).get(name)


class Visitor:
    def __init__(self, page: Page) -> None:
        self.page = page

    async def ask(self, prompt: str, options: str = "{}") -> Answer:
        """Calls the module. `options` is a JavaScript expression."""
        result = await self.page.evaluate(f"(prompt) => ask(prompt, {options})", prompt)
        return Answer(result.get("text"), result["tokens"], result.get("error"))

    async def tokens(self) -> list[str]:
        return await self.page.evaluate("window.tokens ?? []")


@asynccontextmanager
async def visiting(browser: Browser, site: Site, app: str) -> AsyncIterator[Visitor]:
    """Opens a blank page of the app."""
    page = await browser.new_page()
    await page.add_init_script(SCRIPT)
    await page.goto(f"http://{app}.{DOMAIN}:{site.port}/blank")
    yield Visitor(page)
    await page.close()
