"""The template's module as an npm package: packed, checked by TypeScript, bundled by Vite, and run in a browser."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.browser.packages import HERE, require
from tests.browser.site import MODULE, Folder
from tests.fakes import FakeProvider
from tests.fakes.provider import tokens
from tests.support import programs
from tests.support.gateway_process import DOMAIN, App

NAME = json.loads((MODULE / "package.json").read_text())["name"]
PAGE = '<!doctype html><title>An app</title><output></output><script type="module" src="./main.ts"></script>'
MAIN = f"""
import {{ AiError, complete, streamComplete, type AnswerEnd }} from "{NAME}";
import {{ setTokenSource }} from "{NAME}/auth";

setTokenSource(async () => "TOKEN");
const ended: AnswerEnd[] = [];
const answer: string = await complete("PROMPT").catch((error: AiError) => error.code);
const streamed: string = await streamComplete("PROMPT", () => {{}}, {{ onDone: (end) => void ended.push(end) }});
document.querySelector("output")!.textContent = `${{answer}} ${{streamed}} ${{ended.length}}`;
"""


def install(folder: Path) -> list[str]:
    """Installs the package in an app's folder as npm would, and returns the names of its files."""
    environment = {**os.environ, "npm_config_cache": str(folder / ".npm")}
    command = [programs.require("npm"), "pack", "--silent", "--pack-destination", folder]
    subprocess.run(command, cwd=MODULE, env=environment, check=True, capture_output=True, timeout=60)
    [packed] = folder.glob("*.tgz")
    (folder / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", packed, "-C", folder / "unpacked"], check=True, timeout=60)
    installed = folder / "node_modules" / NAME
    installed.parent.mkdir()
    (folder / "unpacked" / "package").rename(installed)
    return sorted(str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file())


def run(tool: Path, *arguments: str, cwd: Path, **settings: str) -> None:
    environment = {**os.environ, **settings}
    done = subprocess.run([tool, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.asyncio(loop_scope="session")
async def test_the_package_answers_in_a_vite_app(
    browser: Browser, app: App, provider: FakeProvider, tmp_path: Path
) -> None:
    vite, tsc = require(".bin/vite"), require(".bin/tsc")
    files = install(tmp_path)
    assert files == ["README.md", "lib/ai.d.ts", "lib/ai.js", "lib/auth.d.ts", "lib/auth.js", "package.json"]

    prompt = provider.plays(tokens("Bon", "jour"))
    (tmp_path / "index.html").write_text(PAGE)
    (tmp_path / "main.ts").write_text(MAIN.replace("PROMPT", prompt).replace("TOKEN", app.token()))
    strict = ["--strict", "--noEmit", "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"]
    run(tsc, *strict, "main.ts", cwd=tmp_path)
    address = app.gateway.address + app.path
    run(vite, "build", "--target", "es2022", cwd=tmp_path, VITE_SERVICE_AI_URL=address)

    async with Folder(tmp_path / "dist") as site:
        page = await browser.new_page()
        await page.goto(f"http://{app.name}.{DOMAIN}:{site.port}/")
        await expect(page.locator("output")).to_have_text("Bonjour Bonjour 1")
        await page.close()


def test_the_types_hold() -> None:
    """Of ai.d.ts, and an app in TypeScript can use it: tsc checks both in its strictest mode."""
    checked = subprocess.run([require(".bin/tsc"), "--project", HERE], capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout
