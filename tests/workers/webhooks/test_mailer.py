"""Notices by real workers, through a real mail server."""

import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from email.message import EmailMessage
from functools import partial
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from gateway.accounts.records import Deletion, Suspension
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.events.catalog import SAMPLES
from gateway.events.notices import EndLink, NoticeChoices, Notices, count_outcomes, open_link
from gateway.keys import dead_letters_key, partition_tag, stream_key
from gateway.settings import Settings
from tests.fakes.mail_server import PASSWORD, MailServer, subjects, text_of
from tests.fakes.receiver import FakeReceiver
from tests.support.background import in_background
from tests.support.logs import captured
from tests.support.monitored_apps import fleet
from tests.support.polling import wait_until
from tests.support.processes import ENCRYPTION_KEY
from tests.support.senders import sending
from tests.support.worker_process import Account, Queue
from workers.monitors.uptime import Uptime
from workers.webhooks import mailer

pytestmark = pytest.mark.asyncio(loop_scope="session")

ADA, BOB = "ada@example.com", "bob@example.com"
FAILED = msgspec.structs.replace(SAMPLES["deploy.failed"], sample=msgspec.UNSET)
DEPLOYS = NoticeChoices(deployFailed=True)
SENT_SECONDS = 30  # in which a machine that is busy with other tests sends some notices


@pytest_asyncio.fixture(loop_scope="session")
async def server() -> AsyncIterator[MailServer]:
    async with MailServer() as server:
        yield server


def registry_of(own: Queue) -> Registry:
    return Registry(own.store, Vault(ENCRYPTION_KEY))


async def subscribed(own: Queue, choices: NoticeChoices = DEPLOYS) -> Account:
    """Creates an account without a receiver, of which Ada gets these notices."""
    record, key = await registry_of(own).create_account("Ada’s workshop", "maker")
    own.confidential.add(key)
    await join(own, record.id, ADA, choices)
    return Account(own, record.id)


async def join(own: Queue, account: str, address: str, choices: NoticeChoices = DEPLOYS) -> None:
    """Makes the address a member who gets these notices."""
    await registry_of(own).members.put(account, address, "developer")
    await Notices(own.store).choose(account, address, choices)


def mail(
    own: Queue, server: MailServer, workers: int = 1, quick: Mapping[str, float] | None = None, **settings: str
) -> AbstractAsyncContextManager[None]:
    """Sends deliveries and notices in this process."""
    own.confidential.add(PASSWORD)
    settings |= {"smtp_url": server.url, "mail_from": "Capsule <notices@example.com>"}
    return sending(own, workers, mailer={"first_pause": 0.2, **(quick or {})}, **settings)


async def outcomes(own: Queue, **expected: int) -> None:
    found = Counter(expected)
    await wait_until(lambda: count_outcomes(own.store), SENT_SECONDS, holds=lambda each: +Counter(each) == found)


def link_of(message: EmailMessage) -> EndLink | None:
    return open_link(Vault(ENCRYPTION_KEY), message["List-Unsubscribe"].strip("<>").rpartition("/")[2])


async def test_two_workers_send_each_notice_once(own: Queue, server: MailServer) -> None:
    account = await subscribed(own)
    await join(own, account.id, BOB, NoticeChoices(finding=True))
    with captured(mailer) as log:
        async with mail(own, server, workers=2):
            events = [await account.emit(FAILED) for _ in range(10)]
            record = await registry_of(own).account(account.id)
            await own.webhooks.queue_sample(record, "security.finding", None, "apps.example.com")
            await account.emit(SAMPLES["deploy.succeeded"])
            await own.drained()
            await own.webhooks.redeliver(account.id, events[0])
            await own.drained()
            await outcomes(own, sent=10)
    assert server.recipients == [ADA] * 10
    assert subjects(server) == [f"The deploy of {account.app.name} failed"] * 10
    assert len({message["Message-ID"] for message in server.messages}) == 10
    message = server.messages[0]
    assert "Ada’s workshop" in text_of(message)
    assert link_of(message) == EndLink(ADA, "notices")
    assert ADA not in str(log)
    assert not [key for key in await own.store.list_keys() if "@" in key]


@pytest.mark.parametrize("smtps", [False, True])
async def test_tls_and_a_password(own: Queue, tls: tuple[ssl.SSLContext, str], smtps: bool) -> None:
    """The server's certificate is verified, and the password is only sent over TLS."""
    async with MailServer(tls[0], smtps=smtps, log_in=True) as server:
        account = await subscribed(own)
        await account.emit(FAILED)
        with captured(mailer) as log:
            async with mail(own, server):
                await wait_until(lambda: "notice.not_sent" in str(log), 10)
        assert "Cert" in str(log)
        assert PASSWORD not in str(log)
        assert server.messages == []
        async with mail(own, server, ca_file=tls[1]):
            await outcomes(own, sent=1)
        assert server.encrypted == [True]


async def test_a_notice_is_tried_again(own: Queue, server: MailServer) -> None:
    """An entry before it that is no notice becomes a dead letter."""
    assert mailer.RETRY_SECONDS == 3_600
    server.refusals = ["451 later", "550 never", "421 closing"]
    account = await subscribed(own)
    tag = partition_tag(account.id)
    fields = {"account": account.id, "address": "hash", "kind": "budget", "type": "unknown", "app": "", "data": "{}"}
    await own.store.client.xadd(stream_key(tag, "mails"), fields)
    await account.emit(FAILED)
    with captured(mailer) as log:
        async with mail(own, server):
            await outcomes(own, sent=1)
    assert len(server.attempts) == 4
    [entry] = {line["entry"] for line in log if line["event"] == "notice.not_sent"}
    assert f"{tag.strip('{}')}.{entry}" in server.messages[0]["Message-ID"], "a repeated notice has the same id"
    assert await own.store.client.xlen(dead_letters_key(tag)) == 1


async def test_a_server_that_hangs_delays_no_delivery(own: Queue, receiver: FakeReceiver) -> None:
    async with MailServer(greets=False) as server:
        account = await (await subscribed(own)).set(receiver.url("/hooks"))
        await join(own, account.id, BOB)
        with captured(mailer) as log:
            async with mail(own, server, quick={"attempt_seconds": 0.5, "retry_seconds": 2}):
                events, began = [await account.emit(FAILED) for _ in range(10)], time.monotonic()
                for event in events:
                    assert await account.outcome(event, 10) == ("delivered", 204)
                assert time.monotonic() - began < 8  # behind 20 attempts of half a second, they would take ten
                await wait_until(lambda: server.connections > 20, 10)
                await outcomes(own, failed=20)
    assert {line["reason"] for line in log if line["event"] == "notice.not_sent"} == {"timeout"}


async def test_at_most_ten_of_an_account_and_twenty_of_all_in_a_day(own: Queue, server: MailServer) -> None:
    """So a shared account in which many deploys fail does not silence a person's other accounts."""
    shared, second, third = [await subscribed(own) for _ in range(3)]
    async with mail(own, server):
        for _ in range(25):
            await shared.emit(FAILED)
        await outcomes(own, sent=10, limited=15)
        await second.emit(FAILED)
        await outcomes(own, sent=11, limited=15)
        assert len(lasts(server)) == 1
        for _ in range(8):
            await second.emit(FAILED)
        await outcomes(own, sent=19, limited=15)
        await second.emit(FAILED)  # alone: of several at once, two may find that they are the last
        await outcomes(own, sent=20, limited=15)
        assert len(lasts(server)) == 2
        for _ in range(2):
            await second.emit(FAILED)
        await outcomes(own, sent=20, limited=17)
        await third.emit(FAILED)
        await outcomes(own, sent=20, limited=18)
        await join(own, third.id, BOB)
        await third.emit(FAILED)
        await outcomes(own, sent=21, limited=19)
        assert server.recipients[-1] == BOB
    counters = [key for key in await own.store.list_keys() if "notices-on" in key]
    assert len(counters) == 6
    for key in counters:
        assert 0 < await own.store.client.ttl(key) <= 2 * mailer.DAY_SECONDS


async def test_a_member_of_one_account_gets_twenty_in_a_day(own: Queue, server: MailServer) -> None:
    account = await subscribed(own)
    async with mail(own, server):
        for _ in range(22):
            await account.emit(FAILED)
        await outcomes(own, sent=20, limited=2)


def lasts(server: MailServer) -> list[EmailMessage]:
    return [message for message in server.messages if "the last notice of today" in text_of(message)]


async def invite(own: Queue, account: str, address: str) -> None:
    record = await registry_of(own).account(account)
    assert record is not None
    placed = await registry_of(own).members.set_role(account, address, "viewer", ADA)
    assert placed.invitation is not None
    await Notices(own.store).queue_invitation(record, placed.invitation)


async def test_invitations_take_nothing_from_notices(own: Queue, server: MailServer) -> None:
    """An address gets five in a day, of whatever accounts, and its notices all the same."""
    account = await subscribed(own)
    for _ in range(mailer.DAILY_INVITATIONS + 1):
        stranger, key = await registry_of(own).create_account("Stranger", "free")
        own.confidential.add(key)
        await invite(own, stranger.id, ADA)
    await invite(own, account.id, BOB)
    await account.emit(FAILED)
    with captured(mailer) as log:
        async with mail(own, server):
            await outcomes(own, sent=mailer.DAILY_INVITATIONS + 2, limited=1)
    assert Counter(server.recipients) == {ADA: mailer.DAILY_INVITATIONS + 1, BOB: 1}
    assert "You are invited to the account Ada’s workshop" in subjects(server)
    assert "last notice of today" not in " ".join(map(text_of, server.messages))
    ends = Counter(map(link_of, server.messages))
    assert ends[EndLink(ADA, "invitations")] == mailer.DAILY_INVITATIONS
    assert (ends[EndLink(BOB, "invitations")], ends[EndLink(ADA, "notices")]) == (1, 1)
    assert BOB not in str(log)


async def test_a_mail_that_waits_is_not_sent_once_somebody_ends_it(own: Queue, server: MailServer) -> None:
    """The account, the person that it invites, or a member."""
    server.refusals = ["451 later"] * 100
    account = await subscribed(own)
    await invite(own, account.id, BOB)
    await invite(own, account.id, "cyd@example.com")
    await account.emit(FAILED)
    async with mail(own, server):
        await wait_until(lambda: server.attempts, 10)
        assert await Registry(own.store, Vault("")).members.remove(account.id, BOB)
        await Notices(own.store).end_invitations("cyd@example.com")
        await Notices(own.store).end(account.id, ADA)
        await outcomes(own, ended=3)
    assert server.messages == []


async def test_an_account_that_is_stopped_invites_nobody(own: Queue, server: MailServer) -> None:
    """It may be stopped because it is abused. Its members hear all the same what happens to its apps."""
    registry, at = registry_of(own), "2026-07-02T12:00:00.000Z"
    for change in (
        {"suspension": Suspension("It is abused.", at)},
        {"deletion": Deletion(at=at, deletesAt="2026-08-02T12:00:00.000Z")},
    ):
        account = await subscribed(own)
        await invite(own, account.id, BOB)
        await account.emit(FAILED)
        assert await registry.change_account(account.id, partial(replace, **change))
    async with mail(own, server):
        await outcomes(own, ended=2, sent=2)
    assert server.recipients == [ADA, ADA]


async def test_an_app_that_is_down_and_its_recovery(tmp_path: Path) -> None:
    """The account's receiver gets nothing, so there is no app.recovered: the notices follow from the probes."""
    async with fleet(tmp_path) as own, MailServer() as server:
        app = await own.app()
        await own.queue.webhooks.clear_receiver(app.account.id)
        await join(own.queue, app.account.id, ADA, NoticeChoices(appDown=True))
        probing = Settings(
            redis_url=own.queue.url,
            smtp_url=server.url,
            mail_from="notices@example.com",
            allow_private_addresses=True,
            probe_url=own.site.url("/{app}"),
            probe_interval=0.1,
            probe_timeout=1,
        )
        async with in_background(Uptime(probing, own.registry).run()), mail(own.queue, server):
            down, up = f"{app.app.name} does not answer", f"{app.app.name} answers again"
            app.fails()
            await wait_until(lambda: subjects(server), 15, holds=lambda found: found == [down])
            app.heals()
            await wait_until(lambda: subjects(server), 15, holds=lambda found: found == [up, down])
