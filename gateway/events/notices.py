"""Notices by e-mail: who gets which kinds, the queue of notices, and the links that end them or invitations.

- `{pNN}:notices:<account>` has the addresses with the kinds that they chose. All other keys have an address's hash
- `{pNN}:mails` has the notices to send, one entry per address. `workers/webhooks/mailer.py` sends them, if the address
  then belongs to an owner or developer of the account, and still wants the kind

Most notices are about an event of the webhooks, which the worker reads anyway. Two are not: inference emits no event,
and an `app.recovered` is only for receivers that got the `app.unhealthy`.

An invitation waits in the same queue. Nobody chooses to get one: it goes to the address that is invited, as long as it
is, unless the address has ended invitations. Since accounts decide to whom they go, they have limits of their own, and
leave an address's notices alone.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec
import structlog

from gateway.accounts.api_keys import digest
from gateway.accounts.members import Invitation
from gateway.accounts.records import Account, App
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.events import scripts
from gateway.events.catalog import (
    AppRecovered,
    AppUnhealthy,
    DeployFailed,
    DomainExpiring,
    SecurityFinding,
    encode_data,
)
from gateway.events.records import QueuedNotice
from gateway.keys import (
    PARTITION_TAGS,
    bodies_key,
    invitation_mails_key,
    mail_outcomes_key,
    notices_key,
    uninvited_key,
)
from gateway.redis.client import Store

logger = structlog.get_logger()

GROUP, STREAM = "notices", "mails"
MARK_SECONDS = 2 * 86_400  # for which a notice is not repeated
SHOWN_FINDINGS = 10  # of a scan
INVITATION = "invitation"  # a kind that nobody chooses
INVITATION_MAILS = 50  # of one account in 24 hours
DAY_SECONDS = 86_400
UNINVITED_DAYS = 400  # for which an address that has ended invitations gets none by e-mail

# What a link ends: all notices and invitations by e-mail, or only the latter. A stranger's invitation leads to the
# second, because whoever wants no more of them still wants to hear of their own apps.
Purpose = Literal["notices", "invitations"]
# Before the address in a link, so that no other sealed text is one.
PREFIXES: dict[Purpose, str] = {"notices": "unsubscribe ", "invitations": "uninvite "}
Kind = Literal["budget", "deployFailed", "appDown", "certificate", "finding"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Of the events that lead to a notice. An app that is down and its recovery are two levels of one subject.
KIND_OF_EVENT: dict[str, Kind] = {
    DeployFailed.type: "deployFailed",
    AppUnhealthy.type: "appDown",
    DomainExpiring.type: "certificate",
    SecurityFinding.type: "finding",
}
RECOVERED_LEVEL = 2
# Of a notice: the server has it; or it did not take it for an hour; or the address has got as many as it may get on a
# day, of all accounts or of this one; or it gets none any more, as it gets no invitation of a stopped account.
Outcome = Literal["sent", "failed", "limited", "ended"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class NoticeChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kinds of notices that one person gets from an account."""

    budget: bool = False  # 80% and 100% of a daily cap, of the account or of an app
    deployFailed: bool = False
    appDown: bool = False  # an app is unhealthy, or has recovered
    certificate: bool = False  # the certificate of a custom domain ends
    finding: bool = False  # a red security finding

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind in KINDS if getattr(self, kind)]


class Subscriber(msgspec.Struct, frozen=True):
    """An address, and the kinds of notices that it gets from an account."""

    address: str
    kinds: Sequence[Kind | Literal["invitation"]]


class BudgetUse(NamedTuple):
    level: Literal[80, 100]  # percent of the cap
    used: int  # nano-euro, settled and reserved
    cap: int
    day: str  # UTC


async def count_outcomes(store: Store) -> dict[str, int]:
    """Returns the number of notices that ended so far, by outcome. Raises BackboneUnavailable."""
    counts: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
    for answer in await store.read_each(PARTITION_TAGS, lambda pipe, tag: pipe.hgetall(mail_outcomes_key(tag))):
        for outcome, number in answer.items():
            counts[outcome] = counts.get(outcome, 0) + int(number)
    return counts


class Notices:
    """Every method raises BackboneUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # -- who gets which --------------------------------------------------------------------------------------

    async def read_choices(self, account_id: str, address: str) -> NoticeChoices:
        text = await self._store.client.hget(notices_key(account_id), digest(address))
        kinds = msgspec.json.decode(text, type=Subscriber).kinds if text else []
        return NoticeChoices(**dict.fromkeys(kinds, True))

    async def choose(self, account_id: str, address: str, choices: NoticeChoices) -> None:
        """Replaces what the address, which is in lower case, gets from the account."""
        if not choices.kinds:
            return await self.end(account_id, address)
        subscriber = msgspec.json.encode(Subscriber(address, choices.kinds)).decode()
        await self._store.client.hset(notices_key(account_id), digest(address), subscriber)

    async def end(self, account_id: str, address: str) -> None:
        """Ends all notices of the account to the address, also those that wait to be sent."""
        await self._store.client.hdel(notices_key(account_id), digest(address))

    async def end_invitations(self, address: str) -> None:
        """Ends invitations by e-mail to the address, also those that wait to be sent. The dashboard shows all."""
        await self._store.client.set(uninvited_key(digest(address)), "1", ex=UNINVITED_DAYS * DAY_SECONDS)

    # -- the queue -------------------------------------------------------------------------------------------

    async def queue_for_event(self, fields: Mapping[str, str]) -> None:
        """Queues the notices about an event of the webhooks' stream, once."""
        account_id, event_id = fields["account"], fields["id"]
        if not await self._store.client.exists(notices_key(account_id)):
            return
        data = await self._store.client.hget(bodies_key(account_id), event_id)
        if data is not None:  # otherwise the event has its outcome, and so its notices
            kind = KIND_OF_EVENT[fields["type"]]
            await self._queue(account_id, kind, event_id, 1, fields["type"], fields["app"], shorten_data(data))

    async def queue_recovery(self, app: App, unhealthy: str, recovery: AppRecovered) -> None:
        """Queues the notices that an app answers again, after the event with the id `unhealthy`, once."""
        data = encode_data(recovery, app.id, app.name).decode()
        await self._queue(app.account, "appDown", unhealthy, RECOVERED_LEVEL, recovery.type, app.name, data)

    async def queue_budget(self, account_id: str, app: tuple[str, str] | None, use: BudgetUse) -> None:
        """Queues the notices about a cap, of the account or of an app (id and name), once per level and day."""
        app_id, name = app or ("", "")
        data = msgspec.json.encode(use._asdict()).decode()
        await self._queue(account_id, "budget", f"{use.day}:{app_id}", use.level, "budget", name, data)

    async def queue_invitation(self, account: Account, invitation: Invitation) -> None:
        """Queues an invitation, at most one in two days for an address.

        One beyond the account's limit is not sent. The dashboard shows it all the same.
        """
        sent, _ = await self._store.increment(invitation_mails_key(account.id), DAY_SECONDS)
        if sent > INVITATION_MAILS:
            logger.warning(
                "notice.dropped", account=account.id, type=INVITATION, reason="the account has sent too many"
            )
            return
        data = {"account": account.id, "name": account.name, "by": invitation.by, "role": invitation.role}
        text = msgspec.json.encode({**data, "endsAt": invitation.endsAt}).decode()
        hashed = digest(invitation.email)
        await self._queue(account.id, INVITATION, f"{INVITATION}:{hashed}", 1, INVITATION, "", text, address=hashed)

    async def _queue(
        self,
        account_id: str,
        kind: str,
        subject: str,
        level: int,
        notice_type: str,
        app: str,
        data: str,
        *,
        address: str = "",
    ) -> None:
        notice = QueuedNotice(account_id, kind, notice_type, app, data, address)
        queued = await scripts.queue_notice(self._store, notice, subject, level, mark_seconds=MARK_SECONDS)
        if queued < 0:
            logger.error("notice.dropped", account=account_id, type=notice_type, reason="too many wait")
        elif queued:
            logger.info("notice.queued", account=account_id, type=notice_type, addresses=queued)


def shorten_data(data: str) -> str:
    """Returns the data of an event with the first findings, and the number of all."""
    fields = msgspec.json.decode(data)
    if "findings" not in fields:
        return data
    found = fields["findings"]
    return msgspec.json.encode({"findings": found[:SHOWN_FINDINGS], "count": len(found)}).decode()


# -- links that end notices or invitations ---------------------------------------------------------------------


class EndLink(NamedTuple):
    address: str
    purpose: Purpose


def seal_link(vault: Vault, link: EndLink) -> str:
    """Returns what the link has in place of the address, which must not be in an access log."""
    return vault.seal(PREFIXES[link.purpose] + link.address).rstrip("=")


def open_link(vault: Vault, sealed: str) -> EndLink | None:
    """Returns whose link it is and what it ends, or None if this service did not make the link."""
    try:
        text = vault.open(sealed + "=" * (-len(sealed) % 4))
    except (NoEncryptionKey, ValueError):
        return None
    for purpose, prefix in PREFIXES.items():
        if text.startswith(prefix):
            return EndLink(text.removeprefix(prefix), purpose)
    return None
