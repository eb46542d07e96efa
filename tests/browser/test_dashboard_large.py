"""An account with 200 apps and 500 deploys: every view is short, and an app is found by a part of its name."""

import asyncio

import pytest
from playwright.async_api import Locator, expect

from gateway.keys import deploy_key, deploys_key
from tests.browser.axe import EVERY_LOOK, PHONE, assert_accessible, open_view
from tests.browser.dashboard import VIEWS, Holder

pytestmark = pytest.mark.asyncio(loop_scope="session")

APPS, FAILED, DEPLOYS, SCREENS = 200, 20, 500, 5


async def fill(holder: Holder) -> list[str]:
    """Creates apps. The last deploys of some failed: most for one reason, seven for a reason of their own.

    The earlier deploys of these are copies, because each deploy takes several requests.
    """
    limit, prefix = asyncio.Semaphore(4), holder.account.id[-6:].lower()
    names = [f"{name}-{prefix}-{n:03}" for n, name in enumerate(["shop", "notes", "a-long-name-of-an-app"] * 67)][:APPS]

    async def create(name: str) -> None:
        async with limit:
            await holder.app(name)

    async def fail(n: int) -> None:
        async with limit:
            deploy = await holder.deploy(names[-n])
            reason = f"npm ended with status {n}" if n < 8 else "git.invalid cannot be resolved"
            await holder.report(deploy, "build", ok=False, reason=reason)

    await asyncio.gather(*map(create, names))
    await asyncio.gather(*map(fail, range(1, FAILED + 1)))
    copy_deploys(holder)
    return sorted(names)


def copy_deploys(holder: Holder) -> None:
    account = holder.account.id
    with holder.gateway.redis.client() as client:
        last = client.zrange(deploys_key(account), 0, -1, withscores=True)
        originals = [(client.hgetall(deploy_key(account, name.decode())), at) for name, at in last]
        pipeline = client.pipeline()
        for n in range(DEPLOYS - FAILED):
            record, at = originals[n % FAILED]
            name, at = f"dep_{n:026}", at - 60_000 * (n + 1)
            pipeline.hset(deploy_key(account, name), mapping={**record, b"id": name})
            pipeline.expire(deploy_key(account, name), 600)
            pipeline.zadd(deploys_key(account), {name: at})
        pipeline.execute()


async def test_a_large_account(holder: Holder) -> None:
    page = holder.page
    names = await fill(holder)
    await holder.log_in()
    strip = page.get_by_role("region", name="Needs attention")
    items = strip.get_by_role("listitem").filter(visible=True)
    await expect(items).to_have_count(5)
    await expect(strip.get_by_text("And 3 more")).to_be_visible()
    await strip.get_by_text("And 3 more").click()
    await expect(items).to_have_count(8)
    same = items.filter(has_text=f"The last deploy of {FAILED - 7} apps failed")
    await expect(same).to_contain_text(f"and {FAILED - 10} more")

    cards = page.locator(".apps > li")
    await expect(cards).to_have_count(9)
    failing = set(await cards.get_by_role("heading").all_inner_texts())
    assert len(failing) == 9
    await page.get_by_label("Order").select_option("By name")
    await expect(cards.get_by_role("heading")).to_have_text(names[:9])
    await holder.button("Show more").click()
    await expect(cards).to_have_count(39)
    await page.get_by_label("Find an app").fill(names[150][-3:])
    await expect(cards.get_by_role("heading")).to_have_text([names[150]])
    await page.reload()
    await expect(page.get_by_label("Find an app")).to_have_value(names[150][-3:])
    await expect(cards).to_have_count(1)
    await assert_accessible(page, EVERY_LOOK)

    for view, labels in {"deploys": ["App", "Show"], "hooks": ["App"], "webhooks": ["All apps"]}.items():
        await open_view(page, view)
        for label in labels:
            await find_app(holder, page.get_by_label(label, exact=True), names[150])

    await page.keyboard.press("Control+k")
    dialog = page.get_by_role("dialog", name="Switch app")
    await expect(dialog.get_by_role("link")).to_have_count(13)
    await expect(dialog.get_by_role("status")).to_have_text("And 188 more apps. Type a part of the name.")
    await assert_accessible(page, EVERY_LOOK)
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    await holder.button("All apps").click()
    await page.keyboard.type(names[7][-6:])
    await expect(dialog.get_by_role("link")).to_have_text([names[7]])
    await page.keyboard.press("Enter")
    await expect(holder.heading(names[7])).to_be_focused()
    await holder.button(names[7]).click()
    await dialog.get_by_role("link", name="All apps").click()
    await expect(holder.heading("Overview")).to_be_focused()

    await page.set_viewport_size(PHONE)
    for view in ("new-app", *VIEWS, "account", f"apps/{names[0]}", f"apps/{names[0]}/deploys"):
        await open_view(page, view)
        height, width = await page.evaluate(
            "[document.documentElement.scrollHeight, document.documentElement.scrollWidth]"
        )
        assert height <= SCREENS * PHONE["height"], (view, height)
        assert width <= PHONE["width"], (view, width)


async def find_app(holder: Holder, select: Locator, name: str) -> None:
    """Chooses the app by a part of its name, with the mouse and with the keyboard."""
    dialog = holder.page.get_by_role("dialog", name="Choose an app")
    await select.click()
    await holder.page.keyboard.type(name[-6:])
    await dialog.get_by_role("button", name=name).click()
    await expect(dialog).to_be_hidden()
    await expect(select).to_have_value(name)
    await expect(select).to_be_focused()
    await holder.page.keyboard.press("Space")
    await expect(dialog.get_by_label("Find an app")).to_be_focused()
    await holder.page.keyboard.press("Escape")
    await expect(select).to_have_value(name)
