"""Entries and records that cannot be processed stop no worker, delay no other events, and stay visible."""

import pytest

from gateway.keys import dead_letters_key, partition_tag, webhook_key
from tests.fakes.receiver import FakeReceiver, verified
from tests.support.logs import captured
from tests.support.polling import wait_until
from tests.support.senders import sending
from tests.support.worker_process import Queue
from workers import stream
from workers.webhooks import sender

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def dead(own: Queue, tag: str) -> list[dict[str, str]]:
    return [fields for _, fields in await own.store.client.xrange(dead_letters_key(tag))]


async def test_unreadable_entries_become_dead_letters(own: Queue, receiver: FakeReceiver) -> None:
    """This holds for entries that arrive before the worker starts and while it runs. All other events arrive."""
    account = await own.account(receiver)
    tag = partition_tag(account.id)
    whole = {"id": "evt_x", "account": account.id, "app": "shop", "type": "app.crashed", "at": "1"}
    elsewhere = own.unset_account(lambda other: other != tag)
    poison = [
        {"garbage": "1"},
        {b"\xff": b"\xfe"},
        {**whole, "at": "yesterday"},
        {**whole, "at": ""},
        {**whole, "account": elsewhere.id},
        *({name: value for name, value in whole.items() if name != missing} for missing in ("id", "account", "type")),
    ]
    with captured(sender) as log:
        for _ in range(2):
            for fields in poison:
                await own.store.client.xadd(f"{tag}:events", fields)
        async with sending(own):
            for _ in range(2):
                assert await account.outcome(await account.emit()) == ("delivered", 204)
                for fields in poison:
                    await own.store.client.xadd(f"{tag}:events", fields)
            letters = await wait_until(lambda: dead(own, tag), holds=lambda found: len(found) == 4 * len(poison))
    assert {letter["reason"].split(":")[0] for letter in letters} == {"KeyError", "ValueError"}
    assert await own.waiting() == 0
    assert [line["event"] for line in log].count("stream.joined") == 1, "the worker never restarted"


async def test_a_broken_receiver_record_fails_its_events(
    own: Queue, receiver: FakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker makes three attempts. Then the account sees a failure, and can send the event again."""
    # It claims entries early, and its deliveries end well before that.
    monkeypatch.setattr(stream, "CLAIM_PAUSE_SECONDS", 0.1)
    account, other = await own.account(receiver), await own.account(receiver)
    record = await own.store.client.get(webhook_key(account.id))
    await own.store.client.set(webhook_key(account.id), '{"url": 1}')
    event_id = await account.emit()
    with captured(sender) as log:
        async with sending(own, sender={"budget": 0.2}, webhook_claim_idle=1.5):
            assert await other.outcome(await other.emit()) == ("delivered", 204)
            assert await account.outcome(event_id, 60) == ("failed", "internal")
            assert [line["event"] for line in log].count("delivery.postponed") == 3
            (letter,) = await dead(own, partition_tag(account.id))
            assert letter["reason"].startswith("ValidationError")
            assert event_id in letter["fields"]
            await own.store.client.set(webhook_key(account.id), record)
            await own.webhooks.redeliver(account.id, event_id)
            await wait_until(lambda: receiver.got(f"/{account.id}"))
    assert verified(receiver.got(f"/{account.id}")[0], account.secret)["id"] == event_id
