"""People sign in at a real OpenID provider, see in the dashboard what their role permits, and choose notices."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from gateway.accounts.sessions import ACCOUNT
from gateway.accounts.vault import Vault
from gateway.events.notices import EndLink, seal_link
from gateway.keys import REGISTRATIONS_KEY
from tests.browser.axe import EVERY_LOOK, assert_accessible
from tests.browser.dashboard import Holder, visiting
from tests.browser.packages import require
from tests.fakes import FakeProvider
from tests.support import programs
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.processes import ENCRYPTION_KEY
from tests.support.redis_servers import free_port
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCRIPT = Path(__file__).parents[1] / "fakes/openid_provider.mjs"
ADA = "ada@example.com"
MAIL = {"GATEWAY_SMTP_URL": "smtp://127.0.0.1:9", "GATEWAY_MAIL_FROM": "notices@example.com"}


@module_fixture
async def people(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway whose people sign in at oidc-provider."""
    require("oidc-provider/lib/index.js")
    port, secret = free_port(), secrets.token_hex(16)
    settings = {"ISSUER": f"http://127.0.0.1:{port}", "CLIENT_ID": "capsule", "CLIENT_SECRET": secret}
    settings |= {"OPERATORS": "groups=operators.example"}
    oidc = {f"GATEWAY_OIDC_{name}": value for name, value in settings.items()}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("people"), **oidc) as gw:
        gw.confidential.add(secret)
        arguments = (str(SCRIPT), str(port), f"{gw.address}/dashboard/callback", "capsule", secret)
        out, error = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        node = await asyncio.create_subprocess_exec(programs.require("node"), *arguments, stdout=out, stderr=error)
        try:
            assert node.stdout
            while (line := await asyncio.wait_for(node.stdout.readline(), 60)) != b"listening\n":
                assert line, "the provider has ended"
            yield gw
        finally:
            node.kill()
            await node.wait()


@pytest_asyncio.fixture(loop_scope="session")
async def holder(browser: Browser, people: Gateway) -> AsyncIterator[Holder]:
    async with visiting(browser, people) as holder:
        yield holder


async def sign_in(page: Page, email: str) -> None:
    """From the log-in page, through the pages of the provider."""
    await page.get_by_role("link", name="Sign in", exact=True).click()
    await page.locator("input[name=login]").fill(email)
    await page.locator("input[name=password]").fill("any")
    await page.get_by_role("button", name="Sign-in").click()
    await page.get_by_role("button", name="Continue").click()


async def test_what_was_typed_is_there_after_the_next_sign_in_but_no_secret(holder: Holder) -> None:
    page, email, app = holder.page, f"ada-{secrets.token_hex(3)}@example.com", f"app-{secrets.token_hex(4)}"
    await holder.go("new-app")  # a deep link
    await sign_in(page, email)
    await expect(holder.heading("New app")).to_be_visible()
    await page.get_by_label("Name").fill(app)
    await holder.button("Create app").click()
    await expect(holder.heading(app)).to_be_visible()
    await holder.go(f"apps/{app}/settings/environment")
    await page.get_by_label("Name", exact=True).fill("KEPT")
    await page.get_by_label("Value", exact=True).fill("of the browser's memory only")
    await page.context.clear_cookies()
    await holder.button("Set", exact=True).click()
    link = page.get_by_role("link", name="Sign in", exact=True)
    await link.evaluate("it => it.addEventListener('click', (event) => event.preventDefault(), { once: true })")
    await link.click()
    assert "memory" not in await page.evaluate("sessionStorage.getItem('capsule-draft')")
    await sign_in(page, email)
    await expect(page.get_by_label("Name", exact=True)).to_have_value("KEPT")
    await expect(page.get_by_label("Value", exact=True)).to_have_value("")
    assert page.url.endswith(f"#/apps/{app}/settings/environment")


async def test_members_and_their_roles(holder: Holder, browser: Browser, people: Gateway) -> None:
    page, owner = holder.page, f"ada-{secrets.token_hex(3)}@example.com"
    await holder.go("account")
    await sign_in(page, owner)
    # The first sign-in creates an account.
    await expect(holder.heading("Account")).to_be_visible()
    await expect(page.get_by_text(f"{owner} (you)")).to_be_visible()
    for attempt in ("canceled", "kept"):
        await page.get_by_label("E-mail address").fill("Bob@example.com")
        await page.get_by_label("Role", exact=True).select_option("viewer")
        await holder.button("Invite", exact=True).click()
        await expect(page.locator("#status")).to_have_text("Invited bob@example.com.")
        await expect(page.get_by_label("Role of bob@example.com")).to_have_value("viewer")
        await expect(holder.row("bob@example.com").first).to_contain_text("Invited ends in")
        if attempt == "canceled":
            await page.get_by_label("Cancel the invitation of bob@example.com").click()
            await expect(page.get_by_label("Role of bob@example.com")).to_have_count(0)
    for role in ("owner", "viewer"):
        await page.get_by_label("Role of bob@example.com").select_option(role)
        await expect(page.locator("#status")).to_have_text(f"bob@example.com is invited as {role}.")
    await page.get_by_label(f"Role of {owner}").select_option("developer")
    await expect(page.get_by_text("only owner. Make another member an owner first.")).to_be_visible()
    await expect(page.get_by_label(f"Role of {owner}")).to_have_value("owner")
    await assert_accessible(page, EVERY_LOOK)

    async with visiting(browser, people) as other:
        # Bob gets an account of his own, and sees the invitation there.
        await other.go()
        await sign_in(other.page, "bob@example.com")
        await expect(other.heading("Overview")).to_be_visible()
        await expect(other.page.locator("#account")).to_have_text("bob@example.com")
        invitation = other.page.get_by_role("listitem").filter(has_text=f"{owner} invites you as viewer")
        await expect(invitation.get_by_text("acc_")).to_be_visible()
        await assert_accessible(other.page, EVERY_LOOK)
        await invitation.get_by_role("button", name="Accept").click()
        await expect(other.page.locator("#account")).to_have_text(owner)
        await expect(other.page.locator("#status")).to_have_text(f"You are now a member of {owner}.")
        await expect(other.heading("Overview")).to_be_visible()
        await expect(other.heading("Invitations", 2)).to_have_count(0)
        await expect(other.page.get_by_role("link", name="New app")).to_have_count(0)
        await expect(page.get_by_label("Remove bob@example.com")).to_be_visible()
        # He belongs to two accounts now: the next time, he chooses.
        await other.button("Log out").click()
        await sign_in_again(other.page)
        await expect(other.heading("Choose an account")).to_be_focused()
        await expect(other.page.get_by_text(f"First owner: {owner}")).to_be_visible()
        await expect(other.page.get_by_text("First owner: bob@example.com")).to_be_visible()
        await assert_accessible(other.page, EVERY_LOOK)
        await other.page.get_by_role("button").filter(has_text=f"First owner: {owner}").click()
        await expect(other.heading("Overview")).to_be_visible()
        await other.go("account")
        await expect(other.heading("Members", 2)).to_be_visible()
        for name in ("Invite", "Create", "Save", "Remove", "Revoke", "Delete"):
            await expect(other.button(name, exact=True)).to_have_count(0)
        # His session ends as soon as he is removed.
        await page.get_by_label("Remove bob@example.com").click()
        await page.get_by_role("dialog").get_by_role("button", name="Remove").click()
        await expect(other.page.get_by_text("Your session has ended.")).to_be_visible()
        await sign_in_again(other.page)
        await expect(other.heading("Account")).to_be_visible()
        await expect(other.page.locator("#account")).to_have_text("bob@example.com")
        # He declines an invitation, accepts the next, and leaves that account himself: another owner is there.
        async with (eve := Visitor(people)).http:
            await eve.join(other.account, "eve@example.com", "owner")
        for answer in ("Decline", "Accept"):
            await other.account.call("PUT", "/account/members/bob@example.com", {"role": "owner"})
            await other.page.reload()
            await other.button(f"{answer} Ana").click()
            await expect(other.heading("Invitations", 2)).to_have_count(0)
        await expect(other.page.locator("#account")).to_have_text("Ana’s workshop")
        await other.go("account")
        await other.button("Leave this account").click()
        await other.page.get_by_role("dialog").get_by_role("button", name="Leave").click()
        await expect(other.page.get_by_text("Your session has ended.")).to_be_visible()

    await holder.go("account")
    await holder.confirm("Log out everywhere", "Log out")
    await expect(page.get_by_text("Your session has ended.")).to_be_visible()


async def test_a_session_without_an_account(holder: Holder, people: Gateway) -> None:
    """Registrations are closed: whoever is invited can answer all the same, and log out."""
    page, email = holder.page, f"cleo-{secrets.token_hex(3)}@example.com"
    for name in ("first", "second"):
        account = holder.account if name == "first" else await people.account()
        await account.call("PUT", f"/account/members/{email}", {"role": "developer"})
    today = f"{REGISTRATIONS_KEY}:{time.strftime('%Y-%m-%d', time.gmtime())}"
    with people.redis.client() as client:
        before = client.get(today)
        client.set(today, 1_000_000, ex=86_400)
        try:
            await holder.go()
            await sign_in(page, email)
            await expect(holder.heading("You are invited")).to_be_focused()
        finally:
            client.set(today, before or 0, keepttl=True)
    await assert_accessible(page, EVERY_LOOK)
    await holder.button("Decline Account").click()
    await expect(holder.button("Decline Ana")).to_be_visible()
    await expect(holder.button("Decline Account")).to_have_count(0)
    await holder.button("Decline Ana").click()
    await expect(holder.heading("No account")).to_be_focused()
    await holder.button("Log out").click()
    await expect(page.get_by_text("You are logged out.")).to_be_visible()
    assert (await page.request.get(f"{people.address}/dashboard/session")).status == 401


async def sign_in_again(page: Page) -> None:
    """The provider remembers the person."""
    await page.get_by_role("link", name="Sign in", exact=True).click()


async def test_an_operator_signs_in(holder: Holder, people: Gateway) -> None:
    page = holder.page
    await page.goto(f"{people.address}/ops")
    await sign_in(page, "root@operators.example")
    await expect(page).to_have_url(f"{people.address}/ops")
    await expect(page.get_by_role("link", name="Accounts")).to_be_visible()
    await holder.button("Log out").click()
    await expect(page.get_by_text("You are logged out.")).to_be_visible()
    assert (await page.request.get(f"{people.address}/platform/inference")).status == 401


async def test_an_operator_is_removed_from_the_account_that_is_open(holder: Holder, people: Gateway) -> None:
    """The dashboard asks for another account, and /ops goes on."""
    page, email = holder.page, f"root-{secrets.token_hex(3)}@operators.example"
    await holder.go()
    await sign_in(page, email)
    await expect(page.locator("#account")).to_have_text(email)
    await holder.account.call("PUT", f"/account/members/{email}", {"role": "developer"})
    await page.reload()
    await holder.button("Accept Ana").click()
    await expect(page.locator("#account")).to_have_text("Ana’s workshop")
    assert (await holder.account.call("DELETE", f"/account/members/{email}")).status_code == 204
    await expect(holder.heading("Choose an account")).to_be_visible()
    await holder.button(email).click()
    await expect(page.locator("#account")).to_have_text(email)
    assert (await page.request.get(f"{people.address}/platform/inference")).status == 200


async def test_an_address_that_is_not_verified(holder: Holder) -> None:
    await holder.go()
    await sign_in(holder.page, "unverified@example.com")
    await expect(holder.heading("You are not signed in")).to_be_visible()
    await expect(holder.page.get_by_text("verify your address there")).to_be_visible()


async def test_without_a_provider_there_is_no_button(browser: Browser, gw: Gateway) -> None:
    async with visiting(browser, gw) as holder:
        for path in ("dashboard", "ops"):
            await holder.page.goto(f"{gw.address}/{path}")
            await expect(holder.heading("Log in")).to_be_visible()
            await expect(holder.page.get_by_text("Sign in", exact=True)).to_be_hidden()


async def test_a_member_chooses_and_ends_notices(browser: Browser, provider: FakeProvider, tmp_path: Path) -> None:
    async with gateway_with_redis(provider, tmp_path, **MAIL) as gw:
        account = await gw.account()
        member = Visitor(gw)
        async with await browser.new_context() as context, member.http:
            await member.join(account, ADA, "developer")
            await context.add_cookies([{"name": ACCOUNT, "value": member.token, "url": gw.address}])
            page = await context.new_page()
            complaints: list[str] = []
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
            await page.goto(f"{gw.address}/dashboard#/account")
            box = page.get_by_label("A deploy fails")
            await box.check()
            await page.get_by_role("button", name="Save the notices").click()
            await expect(page.get_by_text("Saved.", exact=True)).to_be_visible()
            await page.reload()
            await expect(box).to_be_checked()
            await page.goto(f"{gw.address}/unsubscribe/{seal_link(Vault(ENCRYPTION_KEY), EndLink(ADA, 'notices'))}")
            assert (await member.call("GET", "/account/notices")).json()["deployFailed"] is True
            await page.get_by_role("button", name="End all notices").click()
            await expect(page.get_by_role("heading", name="Your notices have ended")).to_be_visible()
            assert (await member.call("GET", "/account/notices")).json()["deployFailed"] is False
            assert complaints == []
