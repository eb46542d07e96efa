"""Notices over HTTP: who may choose them, the links that end them, and a cap that a request reaches."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest
import pytest_asyncio

from gateway.accounts.api_keys import digest
from gateway.accounts.vault import Vault
from gateway.events.notices import KINDS, EndLink, NoticeChoices, Notices, Purpose, seal_link
from gateway.keys import notices_key, partition_tag, stream_key, uninvited_key
from gateway.settings import BadSettings, load
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import Account
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.processes import ENCRYPTION_KEY
from tests.support.responses import refused
from tests.support.stores import opened
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")

Join = Callable[..., Awaitable[Visitor]]
ADA = "ada@example.com"
NONE = dict.fromkeys(KINDS, False)
MAIL = {"GATEWAY_SMTP_URL": "smtp://127.0.0.1:9", "GATEWAY_MAIL_FROM": "notices@example.com"}


@module_fixture
async def mailing(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway that queues notices. No worker sends them."""
    caps = {"GATEWAY_DAILY_CAPS": "starter=0.000001"}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("mailing"), **MAIL, **caps) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def member() -> AsyncIterator[Join]:
    """Yields a function that adds a member to an account, and returns the member's browser, signed in."""
    async with AsyncExitStack() as open_browsers:

        async def join(account: Account, email: str, role: str = "developer") -> Visitor:
            visitor = Visitor(account.gateway)
            open_browsers.push_async_callback(visitor.http.aclose)
            await visitor.join(account, email, role)
            return visitor

        yield join


def new_email() -> str:
    return f"{secrets.token_hex(6)}@example.com"


def path_of(email: str, purpose: Purpose) -> str:
    """Returns the path of the link in a message to the address."""
    return f"/unsubscribe/{seal_link(Vault(ENCRYPTION_KEY), EndLink(email, purpose))}"


async def test_each_member_chooses_for_themselves(gw: Gateway, mailing: Gateway, member: Join) -> None:
    """A viewer chooses none, and neither does an API key, which has no address."""
    account = await mailing.account()
    email = new_email()
    ada, bob = await member(account, email), await member(account, new_email())
    viewer = await member(account, new_email(), "viewer")
    assert (await ada.call("GET", "/account/notices")).json() == NONE
    chosen = {"budget": True, "finding": True}
    assert (await ada.call("PUT", "/account/notices", chosen)).json() == NONE | chosen
    assert (await ada.call("PUT", "/account/notices", {"appDown": True})).json() == NONE | {"appDown": True}
    assert (await bob.call("GET", "/account/notices")).json() == NONE
    assert (await ada.call("GET", "/account")).json()["notices"] is True
    refused(await ada.call("PUT", "/account/notices", {"deploys": True}), 400, "REQUEST_MALFORMED")
    assert (await account.get("/account/audit")).json()[0]["action"] == "choose_notices"
    for caller in (viewer, account):
        refused(await caller.call("PUT", "/account/notices", {"budget": True}), 403, "NOT_PERMITTED")
        assert "notices" not in (await caller.call("GET", "/account")).json()
    refused(await account.get("/account/notices"), 403, "NOT_PERMITTED")
    with mailing.redis.client() as client:
        assert client.hlen(notices_key(account.id)) == 1
        await account.call("DELETE", f"/account/members/{email}")
        assert client.hlen(notices_key(account.id)) == 0
    # Without a mail server, there are none.
    refused(await (await gw.account()).get("/account/notices"), 404, "NOT_FOUND")
    with pytest.raises(BadSettings, match="GATEWAY_MAIL_FROM: is missing"):
        load({"GATEWAY_SMTP_URL": MAIL["GATEWAY_SMTP_URL"]})


async def test_a_link_ends_all_notices_and_only_by_post(mailing: Gateway, member: Join) -> None:
    email = new_email()
    members = [await member(await mailing.account(), email) for _ in range(2)]
    other = await member(await mailing.account(), new_email())
    for each in (*members, other):
        await each.call("PUT", "/account/notices", {"budget": True})
    link = path_of(email, "notices")
    page = await mailing.http.get(link)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert '<form method="post">' in page.text
    assert "form-action 'self'" in page.headers["content-security-policy"]
    assert (await members[0].call("GET", "/account/notices")).json()["budget"] is True
    for _ in range(2):
        ended = await mailing.http.post(link, data={"List-Unsubscribe": "One-Click"})
        assert ended.status_code == 200
        assert "Your notices have ended" in ended.text
        assert "no invitations by e-mail for 400 days" in ended.text
    for each in members:
        assert (await each.call("GET", "/account/notices")).json() == NONE
    assert (await other.call("GET", "/account/notices")).json()["budget"] is True
    others = Vault("another key of more than thirty-two characters")
    for method, text in (("GET", "<!doctype html>"), ("POST", "Not Found")):
        broken = f"/unsubscribe/{seal_link(others, EndLink(ADA, 'notices'))}"
        answer = await mailing.http.request(method, broken, headers={"Accept": "text/html"})
        assert answer.status_code == 404
        assert answer.text.startswith(text)


async def test_the_link_in_an_invitation_ends_only_invitations(mailing: Gateway, member: Join) -> None:
    """So a stranger who invites somebody does not make them miss that their own app is down."""
    email = new_email()
    ada, link = await member(await mailing.account(), email), path_of(email, "invitations")
    await ada.call("PUT", "/account/notices", {"appDown": True})
    page = await mailing.http.get(link)
    assert "End invitations by e-mail?" in page.text
    assert "End all notices" not in page.text
    async with opened(mailing.redis.url) as store:
        assert not await store.client.exists(uninvited_key(digest(email)))
        ended = await mailing.http.post(link, data={"List-Unsubscribe": "One-Click"})
        assert ended.status_code == 200
        assert 0 < await store.client.ttl(uninvited_key(digest(email))) <= 400 * 86_400
    assert "no invitations by e-mail for 400 days. They still wait in the dashboard." in ended.text
    assert "choose notices again" not in ended.text
    assert (await ada.call("GET", "/account/notices")).json() == NONE | {"appDown": True}


async def test_a_refused_request_queues_a_notice(mailing: Gateway, backend: FakeAppBackend) -> None:
    """And an invitation queues one message, but not another role."""
    app = await mailing.app(backend, plan="starter")
    async with opened(mailing.redis.url) as store:

        async def queued() -> list[dict[str, str]]:
            entries = await store.client.xrange(stream_key(partition_tag(app.account.id), "mails"))
            return [fields for _, fields in entries if fields["account"] == app.account.id]

        await Notices(store).choose(app.account.id, ADA, NoticeChoices(budget=True))
        assert (await app.ask("hello")).status_code == 402
        (fields,) = await wait_until(queued)
        assert msgspec.json.decode(fields["data"])["level"] == 100
        invited = new_email()
        for role in ("viewer", "developer"):
            assert (await app.account.call("PUT", f"/account/members/{invited}", {"role": role})).status_code == 200
        assert len(await queued()) == 2
