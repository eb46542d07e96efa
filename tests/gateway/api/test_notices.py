"""Notices over HTTP: who may choose them, the links that end them, and a cap that a request reaches."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from gateway.accounts.access import Access
from gateway.accounts.records import Account
from gateway.accounts.vault import Vault
from gateway.api import notices
from gateway.events.notices import NoticeChoices, Notices, seal_address
from gateway.keys import partition_tag, stream_key
from gateway.settings import Settings
from tests.fakes import FakeAppBackend, FakeProvider
from tests.gateway.conftest import Launch
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import ENCRYPTION_KEY, Gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.responses import refused
from tests.support.stores import opened

pytestmark = pytest.mark.asyncio(loop_scope="session")

ADA = "ada@example.com"
MAIL = {"GATEWAY_SMTP_URL": "smtp://127.0.0.1:9", "GATEWAY_MAIL_FROM": "notices@example.com"}


@module_fixture
async def mailing(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway that queues notices. No worker sends them."""
    caps = {"GATEWAY_DAILY_CAPS": "starter=0.000001"}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("mailing"), **MAIL, **caps) as running:
        yield running


async def test_an_api_key_has_no_address(mailing: Gateway) -> None:
    account = await mailing.account()
    refused(await account.get("/account/notices"), 403, "NOT_PERMITTED")
    bearer = {"Authorization": f"Bearer {account.key}"}
    refused(await mailing.http.put("/account/notices", json={"budget": True}, headers=bearer), 403, "NOT_PERMITTED")
    refused(await mailing.http.put("/account/notices", json={"budget": "x"}, headers=bearer), 400, "REQUEST_MALFORMED")
    refused(await mailing.http.get("/account/notices"), 401, "UNAUTHORIZED")
    assert "notices" not in (await account.get("/account")).json()


async def test_a_person_chooses(mailing: Gateway) -> None:
    """The routes' functions, as the account API calls them for the session of a member."""
    account = Account(id=(await mailing.account()).id, name="One", plan="free", createdAt="")
    settings, chosen = Settings(smtp_url="smtp://localhost"), NoticeChoices(budget=True, finding=True)
    ada, bob = (Access(account, address, "session", email=address) for address in (ADA, "bob@example.com"))
    async with opened(mailing.redis.url) as store:
        assert await notices.choose_notices.fn(ada, chosen, settings, Notices(store)) == chosen
        assert await notices.show_notices.fn(ada, settings, Notices(store)) == chosen
        assert await notices.show_notices.fn(bob, settings, Notices(store)) == NoticeChoices()


async def test_a_service_without_a_mail_server(gw: Gateway) -> None:
    refused(await (await gw.account()).get("/account/notices"), 404, "NOT_FOUND")


async def test_the_settings_of_mail_must_be_complete(launch: Launch) -> None:
    with pytest.raises(RuntimeError, match="GATEWAY_MAIL_FROM: is missing"):
        async with launch(GATEWAY_SMTP_URL=MAIL["GATEWAY_SMTP_URL"]):
            pass


async def test_a_link_ends_all_notices_and_only_by_post(mailing: Gateway) -> None:
    accounts = [await mailing.account() for _ in range(2)]
    link = f"/unsubscribe/{seal_address(Vault(ENCRYPTION_KEY), ADA)}"
    async with opened(mailing.redis.url) as store:
        choices = Notices(store)
        for account in accounts:
            await choices.choose(account.id, ADA, NoticeChoices(budget=True))
        for _ in range(2):
            page = await mailing.http.get(link)
            assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert '<form method="post">' in page.text
            assert "form-action 'self'" in page.headers["content-security-policy"]
        assert await choices.read_choices(accounts[0].id, ADA) == NoticeChoices(budget=True)
        for _ in range(2):
            ended = await mailing.http.post(link, data={"List-Unsubscribe": "One-Click"})
            assert ended.status_code == 200
            assert "Your notices have ended" in ended.text
        for account in accounts:
            assert await choices.read_choices(account.id, ADA) == NoticeChoices()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_broken_link(mailing: Gateway, method: str) -> None:
    link = f"/unsubscribe/{seal_address(Vault('another key of more than thirty-two characters'), ADA)}"
    answer = await mailing.http.request(method, link, headers={"Accept": "text/html"})
    assert answer.status_code == 404
    assert answer.text.startswith("<!doctype html>" if method == "GET" else "Not Found")


async def test_a_refused_request_queues_a_notice(mailing: Gateway, backend: FakeAppBackend) -> None:
    app = await mailing.app(backend, plan="starter")
    async with opened(mailing.redis.url) as store:
        await Notices(store).choose(app.account.id, ADA, NoticeChoices(budget=True))
        assert (await app.ask("hello")).status_code == 402
        mails = stream_key(partition_tag(app.account.id), "mails")
        ((_, fields),) = await wait_until(lambda: store.client.xrange(mails))
        assert msgspec.json.decode(fields["data"])["level"] == 100
        await Notices(store).end_everywhere(ADA)
