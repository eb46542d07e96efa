"""Sends notices by e-mail, from a stream of their own.

A notice has one recipient. The steps are: confirm the ownership of the entry and that the address still wants it, count
it for the day of the account and of the address, write the message, hand it to the mail server, then record the outcome
and acknowledge the entry in one step. If the server does not take it, the notice waits in memory and is tried again for
an hour. Only a worker that dies between the server's acceptance and the record causes a second message. It has the same
Message-ID.

Notices share nothing with deliveries but the process: a server that hangs or refuses delays only other notices. A
refusal for good (5xx) is tried again too: most often it comes from a setting of the server that is soon corrected.

No address is logged. Answers of the server, which may repeat one, are logged by their code only.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import aiosmtplib
import msgspec
import structlog

from gateway.accounts.records import Account
from gateway.accounts.vault import Vault
from gateway.cancellation import RunningTasks
from gateway.errors import BackboneUnavailable
from gateway.events import scripts
from gateway.events.notices import GROUP, INVITATION, STREAM, EndLink, Outcome, Subscriber, seal_link
from gateway.events.records import NoticeClaim
from gateway.keys import (
    account_key,
    account_notices_on_key,
    invitations_on_key,
    memberships_key,
    notices_on_key,
    uninvited_key,
)
from gateway.loops import pauses, until_set
from gateway.pages.mails import Footer, write_message, write_text
from gateway.redis.client import COMMAND_SECONDS, Store, patient, until_redis_answers
from gateway.redis.errors import code_of
from gateway.settings import Settings, SmtpServer, split_smtp_url
from workers.stream import Consumer, Entry, require_partition

logger = structlog.get_logger()

ATTEMPT_SECONDS = 10.0  # from the look-up of the server's name to its acceptance
QUIT_SECONDS = 1.0  # to say goodbye, once the server has accepted the message
RETRY_SECONDS = 3_600.0  # after a notice was queued; the attempt under way is the last one then
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0  # between attempts; each pause is twice the one before
CONNECTIONS = 16  # to the server at a time, per worker
MAX_NOTICES = 1_000  # in memory, per worker
DAILY_NOTICES = 20  # to one address
DAILY_NOTICES_OF_ACCOUNT = 10  # to the address of a member of several, so that none silences the others
DAILY_INVITATIONS = 5  # to one address, of all accounts; apart from notices, which strangers must not use up
DAY_SECONDS = 86_400


class NotSent(Exception):
    """The mail server did not take a message. The text is a reason for the log, without an address."""


class Notice(NamedTuple):
    entry: Entry
    subscriber: Subscriber
    name: str  # of its account
    is_last: bool  # of the day, of this account to this address


class DailyShare(NamedTuple):
    """How many mails of a kind are sent on a day."""

    key: str  # of the counter
    limit: int


def may_send(kind: str, subscriber: Subscriber, account: Account) -> bool:
    """Whether the address wants the kind, which must not be an invitation of a suspended account or one that ends."""
    return kind in subscriber.kinds and (kind != INVITATION or account.suspension is None)


async def count_mail(store: Store, shares: Sequence[DailyShare]) -> int:
    """Counts a mail for each share, in this order, and returns how many more of them all allow.

    Returns -1 if one allows no more. A mail that one share refuses does not count for the later ones: put those that
    others fill too at the end. Raises BackboneUnavailable.
    """
    left = []
    for share in shares:
        count, _ = await store.increment(share.key, 2 * DAY_SECONDS)
        if count > share.limit:
            return -1
        left.append(share.limit - count)
    return min(left)


class Mailer:
    """Sends the notices of the queue.

    `attempt_seconds`: of one attempt. `retry_seconds`: after a notice was queued; a later attempt is the last one.
    `first_pause`: seconds after the first attempt.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        attempt_seconds: float = ATTEMPT_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        first_pause: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self._settings = settings
        self._attempt_seconds, self._retry_seconds, self._first_pause = attempt_seconds, retry_seconds, first_pause
        self._store = Store(settings.redis_url, ca_file=settings.ca_file)
        self._patient_store = patient(self._store, waiting="notice.waiting")
        self._vault = Vault(settings.encryption_key)
        self._tls = trust(settings)
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self._running = RunningTasks()
        self._space_freed, self._stopping = asyncio.Event(), asyncio.Event()
        # An attempt ends before another worker may claim its notice.
        claim_idle = settings.webhook_claim_idle + attempt_seconds
        self._consumer = Consumer(self._store, STREAM, GROUP, claim_idle, self._accept, self._wait_for_space)

    async def run(self) -> None:
        """Runs until canceled. Attempts under way then end within their budget, and other notices are released."""
        try:
            await self._consumer.run()
        finally:
            self._stopping.set()
            if self._running:
                await asyncio.wait(
                    self._running.values(), timeout=self._attempt_seconds + QUIT_SECONDS + 2 * COMMAND_SECONDS
                )
            await self._running.cancel()
            try:
                async with asyncio.timeout(COMMAND_SECONDS):
                    await self._consumer.release_entries()
            except (BackboneUnavailable, TimeoutError) as error:
                logger.warning("notices.not_released", error=code_of(error.__cause__ or error))
            await self._store.close()

    async def _wait_for_space(self) -> None:
        while self._consumer.held_count >= MAX_NOTICES:
            self._space_freed.clear()
            await self._space_freed.wait()

    def _accept(self, entry: Entry) -> None:
        """Accepts an entry from the stream. Raises KeyError or ValueError if it is not a notice."""
        require_partition(entry)
        write_text(entry.fields["type"], entry.fields["app"], msgspec.json.decode(entry.fields["data"]))
        self._running.start(self._run_notice(entry))

    # -- one notice ------------------------------------------------------------------------------------------

    async def _run_notice(self, entry: Entry) -> None:
        try:
            await self._process(entry)
        except Exception as error:
            # A bug: the notice stays pending, and a worker claims it again after the idle time.
            logger.error("notice.postponed", entry=entry.id, exc_info=error)
            with contextlib.suppress(BackboneUnavailable):
                await self._consumer.fail_entry(entry, error)
        finally:
            self._consumer.forget_entry(entry)
            self._space_freed.set()

    async def _process(self, entry: Entry) -> None:
        left = None
        for pause in pauses(self._first_pause, LONGEST_PAUSE_SECONDS):
            async with self._connections:
                if self._stopping.is_set():
                    return None
                claim = await until_redis_answers(lambda: self._claim(entry), waiting="notice.waiting")
                if not claim.owned:
                    return None
                subscriber = msgspec.json.decode(claim.subscriber, type=Subscriber) if claim.subscriber else None
                account = await self._read_account(entry)
                if subscriber is None or account is None or not may_send(entry.fields["kind"], subscriber, account):
                    return await self._record(entry, "ended")
                if left is None:
                    left = await self._count(entry)
                if left < 0:
                    return await self._record(entry, "limited")
                is_last = left == 0 and entry.fields["kind"] != INVITATION
                reason = await self._try(Notice(entry, subscriber, account.name, is_last))
            if not reason:
                return await self._record(entry, "sent")
            if time.time() - int(entry.id.partition("-")[0]) / 1000 > self._retry_seconds:
                return await self._record(entry, "failed", reason)
            logger.warning("notice.not_sent", entry=entry.id, account=entry.fields["account"], reason=reason)
            await until_set(self._stopping, pause)

    async def _claim(self, entry: Entry) -> NoticeClaim:
        await self._consumer.confirm_name()
        account, address, kind = entry.fields["account"], entry.fields["address"], entry.fields["kind"]
        claim = await scripts.claim_notice(
            self._store, entry.tag, account, address, kind, group=GROUP, consumer=self._consumer.name, entry=entry.id
        )
        if kind == INVITATION and await self._store.client.exists(uninvited_key(address)):
            return NoticeClaim(claim.owned, "")
        return claim

    async def _read_account(self, entry: Entry) -> Account | None:
        text = await self._patient_store.get(account_key(entry.fields["account"]))
        return msgspec.json.decode(text, type=Account) if text else None

    async def _count(self, entry: Entry) -> int:
        """Counts a mail, and returns how many more of the account the address may get today; -1 for none."""
        account, hashed, day = entry.fields["account"], entry.fields["address"], datetime.now(UTC).date().isoformat()
        if entry.fields["kind"] == INVITATION:
            share = DailyShare(invitations_on_key(hashed, day), DAILY_INVITATIONS)
            return await count_mail(self._patient_store, [share])
        accounts = (await self._patient_store.get(memberships_key(hashed)) or "").split()
        own = DAILY_NOTICES_OF_ACCOUNT if len(accounts) > 1 else DAILY_NOTICES
        shares = [
            DailyShare(account_notices_on_key(account, hashed, day), own),
            DailyShare(notices_on_key(hashed, day), DAILY_NOTICES),
        ]
        return await count_mail(self._patient_store, shares)

    async def _record(self, entry: Entry, outcome: Outcome, reason: str = "") -> None:
        if await scripts.record_notice(self._patient_store, entry.tag, group=GROUP, entry=entry.id, outcome=outcome):
            fields = entry.fields
            log = logger.warning if outcome == "failed" else logger.info
            log("notice", account=fields["account"], type=fields["type"], outcome=outcome, reason=reason)

    async def _try(self, notice: Notice) -> str:
        """Makes one attempt. Returns '' if the server has the message, or else the reason why not."""
        try:
            async with connect(self._settings, self._tls, self._attempt_seconds) as client:
                await self._send(client, notice)
        except NotSent as error:
            return str(error)
        return ""

    async def _send(self, client: aiosmtplib.SMTP, notice: Notice) -> None:
        fields, base_url = notice.entry.fields, self._settings.base_url
        address = notice.subscriber.address
        link = EndLink(address, "invitations" if fields["kind"] == INVITATION else "notices")
        end = f"{base_url}/unsubscribe/{seal_link(self._vault, link)}"
        message = write_message(
            write_text(fields["type"], fields["app"], msgspec.json.decode(fields["data"])),
            Footer(fields["account"], notice.name, fields["kind"], notice.is_last, base_url, end),
            sender=self._settings.mail_from,
            recipient=address,
            message_id=f"{notice.entry.tag.strip('{}')}.{notice.entry.id}",
            now=time.time(),
        )
        await client.send_message(message, recipients=[address])


# -- the mail server -----------------------------------------------------------------------------------------


def trust(settings: Settings) -> ssl.SSLContext:
    """Returns the authorities that may vouch for a server of the operator."""
    context = ssl.create_default_context()
    if settings.ca_file:
        context.load_verify_locations(settings.ca_file)
    return context


@contextlib.asynccontextmanager
async def connect(
    settings: Settings, tls: ssl.SSLContext, seconds: float = ATTEMPT_SECONDS
) -> AsyncIterator[aiosmtplib.SMTP]:
    """Connects to the mail server and logs in, for one attempt of so many seconds to send. Raises NotSent."""
    try:
        async with asyncio.timeout(seconds):
            client = await _connect(_read_server(settings), tls)
            try:
                yield client
            except BaseException:
                client.close()
                raise
    except (TimeoutError, aiosmtplib.SMTPTimeoutError):
        raise NotSent("timeout") from None
    except aiosmtplib.SMTPRecipientsRefused as error:
        raise NotSent(f"recipient refused with {', '.join(str(each.code) for each in error.recipients)}") from None
    except aiosmtplib.SMTPResponseException as error:
        raise NotSent(f"{type(error).__name__} with {error.code}") from None
    except (aiosmtplib.SMTPException, OSError) as error:  # of TLS too
        raise NotSent(type(error.__cause__ or error).__name__) from None
    with contextlib.suppress(TimeoutError, OSError, aiosmtplib.SMTPException):  # the server has the message
        async with asyncio.timeout(QUIT_SECONDS):
            await client.quit()
    client.close()


def _read_server(settings: Settings) -> SmtpServer:
    """Raises NotSent if the file with the address cannot be used now."""
    try:
        path = settings.smtp_url_file
        return split_smtp_url(Path(path).read_text().strip() if path else settings.smtp_url)
    except (OSError, ValueError):
        raise NotSent("the file that GATEWAY_SMTP_URL_FILE names has no address of a mail server") from None


async def _connect(server: SmtpServer, tls: ssl.SSLContext) -> aiosmtplib.SMTP:
    client = aiosmtplib.SMTP(
        hostname=server.host,
        port=server.port,
        local_hostname=socket.gethostname(),
        use_tls=server.tls,
        start_tls=False if server.tls else None,  # None: if the server offers it
        tls_context=tls,
        timeout=ATTEMPT_SECONDS,
    )
    try:
        await client.connect()
        if server.user:
            if client.get_transport_info("ssl_object") is None and not _is_loopback(client):
                raise NotSent("the server offers no TLS, and the password is only sent with TLS")
            await client.login(server.user, server.password)
    except BaseException:
        client.close()
        raise
    return client


def _is_loopback(client: aiosmtplib.SMTP) -> bool:
    peer = client.get_transport_info("peername")
    return bool(peer) and ipaddress.ip_address(peer[0]).is_loopback
