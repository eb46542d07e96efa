"""The dashboard redelivers failed events, and protects a rotated secret until it is copied."""

import asyncio
import re

import pytest
from playwright.async_api import expect

from tests.browser.axe import assert_accessible
from tests.browser.dashboard import Holder
from tests.fakes.receiver import FakeReceiver
from tests.fakes.server import answer
from tests.support.polling import wait_until
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_all_failed_events_are_redelivered(holder: Holder, worker: Worker, receiver: FakeReceiver) -> None:
    page = holder.page
    await holder.account.set_webhook(receiver.url())
    receiver.plays("/events", answer(500))
    for kind in ("app.crashed", "deploy.failed"):
        await holder.account.call("POST", "/account/webhook/test", {"type": kind})
    await wait_until(lambda: len(receiver.got()) == 2)
    await holder.log_in("webhooks")
    await expect(holder.row("Sample")).to_have_count(2)
    await expect(holder.row("deploy.failed")).to_contain_text(receiver.url().removeprefix("http://"))

    receiver.plays("/events")
    await page.get_by_label("Failed events since").fill("2100-01-01T00:00")
    await holder.button("Redeliver all …").click()
    await expect(page.get_by_text("No event has failed since then.")).to_be_visible()
    await page.get_by_label("Failed events since").fill("2020-01-01T00:00")
    await holder.button("Redeliver all …").click()
    await expect(page.get_by_role("dialog", name="Redeliver 2 events?")).to_be_visible()
    await holder.button("Cancel").click()
    assert len(receiver.got()) == 2
    await holder.confirm("Redeliver all …", "Redeliver")
    await expect(page.get_by_text("2 events are queued again.")).to_be_visible()
    await expect(holder.row("Redelivery").filter(has_text="Delivered")).to_have_count(2)
    assert set(receiver.ids().values()) == {2}
    await page.get_by_label("Failed events since").fill("2020-01-01T00:00")
    await holder.button("Redeliver all …").click()
    await expect(page.get_by_text("No event has failed since then.")).to_be_visible()


async def test_an_uncopied_secret_needs_a_confirmation_to_leave(holder: Holder) -> None:
    """Leaving the view, the page or the session asks first."""
    page = holder.page
    before = await holder.account.set_webhook("http://127.0.0.1:9/events")
    await holder.log_in("webhooks")
    await holder.button("Rotate secret").click()
    dialog = page.get_by_role("dialog", name="Rotate the signing secret?")
    await expect(dialog).to_contain_text("For 24 hours")
    await holder.button("Keep it").click()
    await expect(holder.button("Rotate secret")).to_be_focused()
    await holder.button("Rotate secret").click()
    await dialog.get_by_role("button", name="Rotate").click()
    await expect(holder.heading("Your new signing secret", 2)).to_be_focused()
    await expect(page.get_by_text("The previous secret also signs and expires")).to_be_visible()
    secret = await page.locator(".once code").inner_text()
    holder.gateway.confidential |= {before, secret}
    assert secret != before
    await assert_accessible(page)

    leaving = page.get_by_role("dialog", name="Leave without copying?")
    for leave in (page.get_by_role("link", name="Deploy hooks"), holder.button("Log out")):
        await leave.click()
        await expect(leaving).to_be_visible()
        await holder.button("Stay").click()
        await expect(page.get_by_text(secret)).to_be_visible()
        await expect(page).to_have_url(re.compile("#/webhooks$"))
    questions = []
    page.once("dialog", lambda question: questions.append(question.type) or asyncio.ensure_future(question.accept()))
    await page.reload()
    assert questions == ["beforeunload"]
    await expect(page.get_by_text("The previous secret also signs and expires")).to_be_visible()

    await holder.button("Rotate secret").click()
    await expect(dialog).to_contain_text("The previous secret stops signing immediately.")
    await dialog.get_by_role("button", name="Rotate").click()
    holder.gateway.confidential.add(await page.locator(".once code").inner_text())
    await holder.button("Copy").click()
    await expect(holder.button("Copied")).to_be_visible()
    await page.get_by_role("link", name="Deploy hooks").click()
    await expect(holder.heading("Deploy hooks")).to_be_focused()
