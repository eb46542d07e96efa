"""Who gets which notices, and the queue of notices."""

import msgspec
import pytest

from gateway.accounts.api_keys import digest
from gateway.accounts.members import Invitation
from gateway.accounts.records import Account
from gateway.accounts.vault import Vault
from gateway.events.notices import (
    INVITATION_MAILS,
    BudgetUse,
    EndLink,
    NoticeChoices,
    Notices,
    Purpose,
    open_link,
    seal_link,
)
from gateway.ids import now_iso
from gateway.keys import notices_key, partition_tag, stream_key
from gateway.redis.client import Store

ACCOUNT, OTHER, ADA, BOB = "acc_1", "acc_2", "ada@example.com", "bob@example.com"
ALL = NoticeChoices(budget=True, deployFailed=True, appDown=True, certificate=True, finding=True)


@pytest.fixture
def notices(store: Store) -> Notices:
    return Notices(store)


async def test_nothing_is_left_of_who_wants_none(notices: Notices, store: Store) -> None:
    for address in (ADA, BOB):
        await notices.choose(ACCOUNT, address, ALL)
    assert not [key for key in await store.list_keys() if "@" in key], "no key has an address"
    await notices.choose(ACCOUNT, ADA, NoticeChoices())
    assert await notices.read_choices(ACCOUNT, BOB) == ALL
    await notices.end(ACCOUNT, BOB)
    assert await store.list_keys() == set()


async def test_a_full_cap_after_one_that_is_nearly_full(notices: Notices, store: Store) -> None:
    await notices.choose(ACCOUNT, ADA, ALL)
    queued = stream_key(partition_tag(ACCOUNT), "mails")

    async def report(level: int, app: tuple[str, str] | None, day: str = "2026-07-02") -> int:
        await notices.queue_budget(ACCOUNT, app, BudgetUse(100 if level == 100 else 80, 1, 1, day))
        return int(await store.client.xlen(queued))

    assert [await report(level, None) for level in (80, 80, 100, 100, 80)] == [1, 1, 2, 2, 2]
    assert [await report(level, ("app_1", "notes")) for level in (100, 80)] == [3, 3]
    assert await report(80, None, "2026-07-03") == 4
    assert await store.client.hlen(notices_key(ACCOUNT)) == 1


async def test_an_invitation_is_queued_for_its_address(notices: Notices, store: Store) -> None:
    """Once in two days for an account and an address, and at most fifty of an account in a day."""
    queued = stream_key(partition_tag(ACCOUNT), "mails")
    account = Account(id=ACCOUNT, name="Workshop", plan="free", createdAt="")
    invitation = Invitation(BOB, "viewer", ADA, now_iso(), now_iso())
    for _ in range(2):
        await notices.queue_invitation(account, invitation)
    [(_, fields)] = await store.client.xrange(queued)
    assert (fields["kind"], fields["type"], fields["address"]) == ("invitation", "invitation", digest(BOB))
    assert BOB not in str(fields)
    for number in range(INVITATION_MAILS):
        await notices.queue_invitation(account, msgspec.structs.replace(invitation, email=f"{number}@example.com"))
    assert await store.client.xlen(queued) == INVITATION_MAILS - 1
    assert not [key for key in await store.list_keys() if "@" in key]


@pytest.mark.parametrize("purpose", ["notices", "invitations"])
def test_only_links_of_this_service_end_notices(purpose: Purpose) -> None:
    vault, ends = Vault("a key of more than thirty-two characters"), EndLink(ADA, purpose)
    link = seal_link(vault, ends)
    assert "@" not in link
    assert ADA.partition("@")[0] not in link
    assert open_link(vault, link) == ends
    others = Vault("another key of more than thirty-two chars")
    for forged in (link[:-1], link + "A", "x", "ü", "", vault.seal(ADA), seal_link(others, ends)):
        assert open_link(vault, forged) is None
