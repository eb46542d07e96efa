"""Publishing without a terminal, and trying an app: a real browser packs folders, and asks with a test token."""

import io
import re
import tarfile
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.browser.axe import EVERY_LOOK, assert_accessible
from tests.browser.dashboard import Holder
from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, tokens
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = "<!doctype html><title>Früh</title>"
LONG = "/".join(["a-rather-long-folder"] * 8) + "/früh.txt"


# A drop of a folder, of which scripts can only play the entries.
DROP_FOLDER = """(zone, files) => {
    const entryOf = (name, below) => ({
        name,
        isFile: typeof below === "string",
        isDirectory: typeof below !== "string",
        file: (resolve) => resolve(new File([below], name)),
        createReader() {
            const batches = Object.entries(below).map(([name, inside]) => [entryOf(name, inside)]);
            return { readEntries: (resolve) => resolve(batches.shift() ?? []) };
        },
    });
    DataTransferItem.prototype.webkitGetAsEntry = () => entryOf("site", files);
    const transfer = new DataTransfer();
    transfer.items.add(new File(["x"], "site"));
    zone.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
}"""


async def published(holder: Holder, app: str) -> dict[str, bytes]:
    """Waits for the page of the deploy. Returns the files of its source."""
    await expect(holder.heading(f"Deploy of {app}")).to_be_visible()
    deploy = holder.page.url.rpartition("/")[2]
    stored = await holder.gateway.platform("GET", f"deploys/{deploy}/source")
    with tarfile.open(fileobj=io.BytesIO(stored.content)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def write_folder(folder: Path) -> dict[str, bytes]:
    files = {"index.html": PAGE.encode(), LONG: b"x" * 1_000, "assets/empty.js": b"", "big.bin": b"\0" * 3_000_000}
    ignored = dict.fromkeys(("node_modules/x/i.js", ".git/HEAD", ".DS_Store", "a.log", "assets/b.log", "env/x"), b"x")
    files |= {".gitignore": b"*.log\n", "assets/.gitignore": b"!kept.log\n", "assets/kept.log": b""}
    for name, content in {**files, **ignored, ".env": b"SECRET=1", "env/pyvenv.cfg": b""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return files


async def test_a_folder_becomes_a_deploy(holder: Holder, tmp_path: Path) -> None:
    page, app = holder.page, await holder.app()
    files = write_folder(tmp_path / "site")
    await holder.log_in(f"apps/{app}")
    await holder.button("Publish", exact=True).click()
    await assert_accessible(page, EVERY_LOOK)
    await page.get_by_label("Choose a folder").and_(page.locator("input")).set_input_files(tmp_path / "site")
    await expect(page.get_by_role("status").first).to_have_text(f"Published {app}. 8 files left out.")
    assert await published(holder, app) == files


async def test_a_folder_that_is_dropped_becomes_a_deploy(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    zone = page.get_by_role("dialog", name=f"Publish {app}").locator(".drop")
    await holder.log_in()
    folder = {
        "node_modules": {"x": {"i.js": "", "j.js": ""}},
        "env": {"bin": {"python": ""}, "pyvenv.cfg": ""},
        "logs": {"a.log": "", "kept.log": "x", ".gitignore": "!kept.log"},
        "index.html": PAGE,
        ".env": "",
        ".gitignore": "*.log",
    }
    await holder.go(f"apps/{app}")
    await holder.button("Publish", exact=True).click()
    await zone.evaluate(DROP_FOLDER, folder)
    await expect(page.get_by_role("status").first).to_have_text(f"Published {app}. 6 files left out.")
    kept = {"index.html": PAGE, ".gitignore": "*.log", "logs/.gitignore": "!kept.log", "logs/kept.log": "x"}
    assert await published(holder, app) == {name: text.encode() for name, text in kept.items()}


async def test_a_refused_source_says_why(holder: Holder) -> None:
    page = holder.page
    app, other = await holder.app(), await holder.app()
    await holder.log_in("deploys")
    chooser = page.get_by_label("Choose a file").and_(page.locator("input"))
    alert = page.locator(".drop").get_by_role("alert")

    async def choose(name: str, content: bytes) -> None:
        await chooser.set_input_files({"name": name, "mimeType": "application/gzip", "buffer": content})

    await choose("index.html", PAGE.encode())
    await expect(alert).to_have_text("Choose an app first.")
    await page.get_by_label("App", exact=True).select_option(other)
    await choose("empty.html", b"")
    await expect(alert).to_have_text("The file is empty.")
    await choose("not.tar.gz", b"plain")
    await expect(alert).to_contain_text("This is not a tar.gz file")
    await choose("not.zip", b"PK\3\4")
    await expect(alert).to_contain_text("The zip can't be unpacked")
    await choose("index.html", PAGE.encode())
    assert await published(holder, other) == {"index.html": PAGE.encode()}
    assert app not in await page.inner_text("main")


async def test_trying_an_app(holder: Holder, provider: FakeProvider) -> None:
    page = holder.page
    app = await holder.app()
    await holder.log_in(f"apps/{app}")
    await page.get_by_role("link", name="Try it").click()
    await expect(holder.heading(f"Try {app}")).to_be_focused()
    await assert_accessible(page, EVERY_LOOK)
    prompt = provider.plays(tokens("Hel", "lo"))
    await page.get_by_label("Text").fill(prompt)
    await page.get_by_label("Maximum number of tokens").fill("77")
    await holder.button("Ask", exact=True).click()
    await expect(page.get_by_label("Answer")).to_have_text("Hello")
    await expect(page.get_by_role("main")).to_contain_text("tokens in")
    for name in ("curl", "JavaScript", "Python", "Python, with the Responses API"):
        code = page.get_by_label(name, exact=True)
        await expect(code).to_contain_text(f"/capsule/{app}/ai")
        await expect(code).to_contain_text("77")
        await expect(code).to_contain_text(prompt)

    async def logged() -> bool:
        rows = (await holder.account.get(f"/account/requests?app={app}")).json()
        return [row["status"] for row in rows] == [200]

    await wait_until(logged)
    limit = {"requestsPerMinute": 0}
    assert (await holder.account.call("PUT", f"/account/apps/{app}/limits", limit)).is_success

    async def refused() -> bool:
        await holder.button("Ask", exact=True).click()
        await expect(page.get_by_role("main")).to_contain_text(re.compile("tokens in|limit of requests per minute"))
        return "limit of requests per minute" in await page.get_by_role("main").inner_text()

    await wait_until(refused)


async def test_thinking_that_takes_the_whole_answer_is_explained_and_an_answer_is_stopped(
    holder: Holder, provider: FakeProvider
) -> None:
    page, app, main = holder.page, await holder.app(), holder.page.get_by_role("main")
    await holder.log_in(f"apps/{app}/try")
    prompt = provider.plays(ROLE, chunk(reasoning_content="hm"), chunk(finish="length"), chunk(usage=(5, 500)), DONE)
    await page.get_by_label("Text").fill(prompt)
    await expect(main).not_to_contain_text("reasoningEffort")
    await holder.button("Ask", exact=True).click()
    await expect(main.get_by_role("alert")).to_contain_text("maximum number of tokens for thinking")
    await expect(main).to_contain_text("5 tokens in, 500 out")
    await page.get_by_label("Thinking").select_option("low")
    await expect(main).to_contain_text('reasoningEffort: "low"')
    await expect(main).to_contain_text('reasoning_effort="low"')
    provider.plays(tokens("Enough"), prompt=prompt)
    await holder.button("Ask", exact=True).click()
    await expect(page.get_by_label("Answer")).to_have_text("Enough")
    await expect(main.get_by_role("alert")).to_be_hidden()
    assert [each.json.get("reasoning_effort") for each in provider.asked(prompt)] == [None, "low"]

    await page.get_by_label("Text").fill(provider.plays([*tokens("One")[:2], 30.0]))
    await holder.button("Ask", exact=True).click()
    await expect(page.get_by_label("Answer")).to_have_text("One")
    await holder.button("Stop").click()
    await expect(main).to_contain_text("Stopped.")
    await expect(holder.button("Stop")).to_be_disabled()
