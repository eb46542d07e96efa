"""A page of an app in the browser, whose script calls the module."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

from tests.browser.site import Site
from tests.support.gateway_process import DOMAIN
from tests.support.programs import require

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
