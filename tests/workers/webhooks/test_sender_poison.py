"""Entries and records that cannot be processed stop no worker, delay no other events, and stay visible."""

import pytest

from gateway.keys import dead_letters_key, partition_tag, webhook_key
from tests.fakes.receiver import FakeReceiver, verified
from tests.support.polling import wait_until
from tests.support.worker_process import Queue

pytestmark = pytest.mark.asyncio(loop_scope="session")
# The constants of a worker that claims entries early, and whose deliveries end well before that.
QUICK = {
    "gateway.settings.parsing.SHORTEST_CLAIM_IDLE_SECONDS": 2,
    "workers.webhooks.sender.BUDGET_SECONDS": 0.5,
    "workers.stream.CLAIM_PAUSE_SECONDS": 0.1,
}


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
    worker = None
    for _ in range(2):
        for fields in poison:
            await own.store.client.xadd(f"{tag}:events", fields)
        event_id = await account.emit()
        worker = worker or await own.worker()
        assert await account.outcome(event_id) == ("delivered", 204)

    letters = await wait_until(lambda: dead(own, tag), holds=lambda found: len(found) == 2 * len(poison))
    assert {letter["reason"].split(":")[0] for letter in letters} == {"KeyError", "ValueError"}
    assert await own.waiting() == 0
    assert worker.code is None
    assert worker.log.count("stream.joined") == 1, "the worker never restarted"


async def test_a_broken_receiver_record_fails_its_events(own: Queue, receiver: FakeReceiver) -> None:
    """The worker makes three attempts. Then the account sees a failure, and can send the event again."""
    account, other = await own.account(receiver), await own.account(receiver)
    record = await own.store.client.get(webhook_key(account.id))
    await own.store.client.set(webhook_key(account.id), '{"url": 1}')
    event_id = await account.emit()
    worker = await own.worker(constants=QUICK, GATEWAY_WEBHOOK_CLAIM_IDLE="2")
    worker.tracebacks_allowed = True
    assert await other.outcome(await other.emit()) == ("delivered", 204)
    assert await account.outcome(event_id, 60) == ("failed", "internal")
    assert worker.log.count("delivery.postponed") == 3
    (letter,) = await dead(own, partition_tag(account.id))
    assert letter["reason"].startswith("ValidationError")
    assert event_id in letter["fields"]
    await own.store.client.set(webhook_key(account.id), record)
    await own.webhooks.redeliver(account.id, event_id)
    await wait_until(lambda: receiver.got(f"/{account.id}"))
    assert verified(receiver.got(f"/{account.id}")[0], account.secret)["id"] == event_id
