"""Deliveries: requests, outcomes, fairness between accounts, broken entries, traces, and the lanes alone."""

import asyncio
import itertools
import signal
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.accounts.vault import Vault
from gateway.events.catalog import SAMPLES
from gateway.events.webhooks import Webhooks, new_secret
from gateway.keys import bodies_key, dead_letters_key, partition_tag, previous_secret_key, stream_key, webhook_key
from tests.fakes.collector import HEADER_SECRET, FakeCollector, Span
from tests.fakes.receiver import OK, FakeReceiver, drip, verified
from tests.fakes.server import HANG, Raw, Script, answer
from tests.support.logs import captured
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.senders import sending
from tests.support.worker_process import CRASH, Account, Queue, queue
from workers import stream
from workers.stream import Entry
from workers.webhooks import sender
from workers.webhooks.lanes import LANE_DELIVERIES, STALLED_SECONDS, Lane, Lanes

pytestmark = pytest.mark.asyncio(loop_scope="session")

BUDGET = 2  # seconds of a delivery; production has 5
SHORT = {"workers.webhooks.sender.BUDGET_SECONDS": BUDGET}
Tls = tuple[ssl.SSLContext, str]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(tmp_path_factory: pytest.TempPathFactory, tls: Tls) -> AsyncIterator[Queue]:
    """A queue with one worker. Its tests use different accounts. The proxies, where nobody listens, are not used."""
    proxy = f"http://127.0.0.1:{free_port()}"
    proxies = {"HTTP_PROXY": proxy, "http_proxy": proxy, "HTTPS_PROXY": proxy, "ALL_PROXY": proxy}
    async with queue(tmp_path_factory.mktemp("queue")) as running:
        worker = await running.worker(constants=SHORT, GATEWAY_CA_FILE=tls[1], **proxies)
        yield running
        assert await worker.stop() == 0


# Delivered


async def test_every_type_is_delivered(shared: Queue, receiver: FakeReceiver) -> None:
    account = await shared.account(receiver)
    ids = {await account.emit(sample): kind for kind, sample in SAMPLES.items()}
    for event_id in ids:
        assert await account.outcome(event_id) == ("delivered", 204)
    envelopes = [verified(exchange, account.secret) for exchange in receiver.got(f"/{account.id}")]
    assert {each["id"]: each["type"] for each in envelopes} == ids


async def test_deliveries_over_tls_reuse_connections(shared: Queue, tls: Tls) -> None:
    async with FakeReceiver(tls[0]) as receiver:
        account = await shared.account(receiver)
        ids = await account.emit_many(20)
        for event_id in ids:
            assert await account.outcome(event_id) == ("delivered", 204)
        exchanges = receiver.got(f"/{account.id}")
        assert sorted(verified(exchange, account.secret)["id"] for exchange in exchanges) == sorted(ids)
        assert len({exchange.connection for exchange in exchanges}) <= 8, "connections are reused"


async def test_what_counts_is_the_time_of_sending(own: Queue, receiver: FakeReceiver) -> None:
    """An event is signed then, for the receiver of that time, and dropped if it is too old or its data are gone."""
    moved, cleared, old, emptied = [await own.account(receiver, f"/{number}") for number in range(4)]
    events = {account: await account.emit() for account in (moved, cleared, old, emptied)}
    young = await old.emit()
    await moved.set(receiver.url("/after"))
    await own.webhooks.clear_receiver(cleared.id)
    await own.store.client.hdel(bodies_key(emptied.id), events[emptied])
    stream, client = stream_key(partition_tag(old.id), "events"), own.store.client
    for entry, fields in await client.xrange(stream):
        if age := {events[old]: 86_410, young: 86_300}.get(fields["id"]):
            await client.xdel(stream, entry)
            await client.xadd(stream, {**fields, "at": int((time.time() - age) * 1000)})
    started = time.time()
    async with sending(own):
        assert await cleared.outcome(events[cleared]) == ("dropped", "no-receiver")
        assert await old.outcome(events[old]) == ("dropped", "expired")
        assert await emptied.outcome(events[emptied]) == ("dropped", "expired")
        assert await moved.outcome(events[moved]) == ("delivered", 204)
        assert await old.outcome(young) == ("delivered", 204)
        assert sorted(exchange.path for exchange in receiver.exchanges) == ["/2", "/after"]
        assert receiver.ids("/2") == {young: 1}
        assert verified(receiver.got("/after")[0], moved.secret)["timestamp"] / 1000 >= started - 0.001


# Failed


@pytest.mark.parametrize("status", [299, 300, 307, 500])
async def test_a_status_other_than_2xx_is_a_failure(shared: Queue, receiver: FakeReceiver, status: int) -> None:
    account = await shared.account(receiver)
    receiver.plays(f"/{account.id}", answer(status, headers={"Location": receiver.url("/elsewhere")}))
    event_id = await account.emit()
    assert await account.outcome(event_id) == (("delivered", 299) if status == 299 else ("failed", "status"))
    (row,) = await account.log()
    assert row["status"] == status
    assert len(receiver.got(f"/{account.id}")) == 1, "not repeated"
    assert receiver.got("/elsewhere") == [], "not followed"


async def test_a_delivery_has_a_budget_until_the_headers_of_the_answer(shared: Queue, receiver: FakeReceiver) -> None:
    """This holds for silence, single bytes and endless 1xx answers."""
    assert sender.BUDGET_SECONDS == 5
    scripts: list[Script] = [[HANG], drip(), [Raw(b"HTTP/1.1 103 Early Hints\r\n\r\n"), HANG]]
    events: dict[Account, str] = {}
    for script in scripts:
        account = await shared.account(receiver)
        receiver.plays(f"/{account.id}", script)
        events[account] = await account.emit()
    for account, event_id in events.items():
        assert await account.outcome(event_id) == ("failed", "timeout")
        (row,) = await account.log()
        assert BUDGET * 1000 - 100 <= row["durationMs"] < BUDGET * 1000 + 1000
        assert len(receiver.got(f"/{account.id}")) == 1


async def test_calls_without_an_answer_are_failures(shared: Queue, tls: Tls, bad_tls: Tls) -> None:
    """The certificate is expired and untrusted, or has another name. No data is sent."""
    async with FakeReceiver(bad_tls[0]) as expired, FakeReceiver(tls[0]) as good:
        for url, reason in (
            (f"http://127.0.0.1:{free_port()}/", "connect"),
            ("https://nobody.invalid/", "dns"),
            *((url, "tls") for url in (expired.url(), good.url(host="localhost"))),
        ):
            account = await shared.account(url)
            assert await account.outcome(await account.emit()) == ("failed", reason), url
        assert [*expired.exchanges, *good.exchanges] == [], "no request was sent"


async def test_an_address_that_is_not_public_is_not_called(own: Queue, receiver: FakeReceiver) -> None:
    """The address was saved while private addresses were allowed, or the name now has another address."""
    async with sending(own, allow_private_addresses=False):
        for url in (receiver.url(), "https://localhost/", "https://127.0.0.1/", "https://[::ffff:127.0.0.1]/"):
            account = await own.account(url)
            assert await account.outcome(await account.emit()) == ("failed", "blocked"), url
        assert receiver.exchanges == []


async def test_an_event_is_not_sent_if_its_secret_cannot_be_decrypted(shared: Queue, receiver: FakeReceiver) -> None:
    account = shared.unset_account()
    webhooks = Webhooks(shared.store, Vault("another key of 32 characters or more"), allow_private=True)
    await webhooks.set_receiver(account.id, receiver.url(f"/{account.id}"))
    assert await account.outcome(await account.emit()) == ("failed", "secret")
    assert receiver.exchanges == []


async def test_a_previous_secret_that_cannot_be_decrypted_does_not_sign(shared: Queue, receiver: FakeReceiver) -> None:
    """Only the new secret signs after the operator has removed the key of the previous one."""
    account = await shared.account(receiver)
    account.secret = await shared.webhooks.rotate_secret(account.id)
    shared.confidential.add(account.secret)
    sealed = Vault("another key of 32 characters or more").seal(new_secret())
    await shared.store.client.set(previous_secret_key(account.id), sealed, ex=60)
    assert await account.outcome(await account.emit()) == ("delivered", 204)
    (exchange,) = receiver.got(f"/{account.id}")
    verified(exchange, account.secret)
    assert " " not in (exchange.header("webhook-signature") or "")


# Fairness


async def test_a_full_lane_drops_its_newest_events(own: Queue, receiver: FakeReceiver) -> None:
    """The log records the dropped events. Other accounts of the same partition are not affected."""
    hanging, lane, count = await own.account(receiver), 100, 150
    path = f"/{hanging.id}"
    receiver.hangs(path)
    tag = partition_tag(hanging.id)
    await hanging.emit_many(count)
    ids = [fields["id"] for _, fields in await own.store.client.xrange(stream_key(tag, "events"))]
    async with sending(own, sender={"budget": BUDGET, "lane_capacity": lane}):
        other = own.unset_account(lambda each: each == tag)
        await other.set(receiver.url(f"/{other.id}"))
        await own.drained(20, lane + 1)
        began = time.monotonic()
        await other.emit()
        await wait_until(lambda: receiver.got(f"/{other.id}"))
        assert time.monotonic() - began < BUDGET, "a hanging receiver delays no other account"
        receiver.plays(path, OK)
        await own.drained(30)
        outcomes = await own.outcomes()
        assert outcomes["delivered"] + outcomes.get("failed", 0) + outcomes["dropped"] == count + 1
        sent = set(receiver.ids(path))
        assert len(sent) == count - outcomes["dropped"]
        assert set(ids[:lane]) <= sent, "the oldest are kept"
        assert 0 < outcomes["dropped"] == outcomes["dropped:overflow"] <= count - lane


async def test_full_memory_drops_the_newest_events_of_hanging_receivers(
    own: Queue, receiver: FakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other accounts neither wait nor lose events."""
    monkeypatch.setattr(sender, "MAX_EVENTS", 100)
    hanging = [await own.account(receiver) for _ in range(6)]
    sent: dict[str, list[str]] = {}
    for account in hanging:
        receiver.hangs(f"/{account.id}")
        sent[account.id] = [await account.emit() for _ in range(40)]
    # Events wait behind the earlier ones of their partition, so the healthy account shares none with the others.
    tags = {partition_tag(account.id) for account in hanging}
    healthy = own.unset_account(lambda tag: tag not in tags)
    await healthy.set(receiver.url(f"/{healthy.id}"))
    async with sending(own, sender={"budget": 1}):
        await wait_until(own.outcomes, 20, holds=lambda found: found.get("dropped", 0) >= 100)
        for _ in range(3):
            assert await healthy.outcome(await healthy.emit(), 3) == ("delivered", 204)
    outcomes, left = await own.outcomes(), await own.waiting()
    assert left + outcomes["delivered"] + outcomes.get("failed", 0) + outcomes["dropped"] == 6 * 40 + 3
    assert outcomes["dropped"] == outcomes["dropped:overflow"] < 6 * 30
    for account in hanging:
        entries = await own.store.client.xrange(stream_key(partition_tag(account.id), "events"))
        kept = {fields["id"] for _, fields in entries} | receiver.ids(f"/{account.id}").keys()
        assert {*sent[account.id][:5]} <= kept, "the oldest are kept"


async def test_events_are_sent_in_order_of_arrival(shared: Queue, receiver: FakeReceiver) -> None:
    """After a timeout, the waiting events of a receiver are sent one by one at first."""
    account = await shared.account(receiver)
    path, answering = f"/{account.id}", asyncio.Event()
    receiver.plays(path, HANG)
    ids = [await account.emit() for _ in range(4)]
    await wait_until(lambda: receiver.got(path))
    receiver.plays(path, answering, OK)
    await wait_until(lambda: len(receiver.got(path)) == 2, 8)
    await asyncio.sleep(0.2)
    assert [exchange.header("x-service-delivery") for exchange in receiver.got(path)] == ids[:2]
    answering.set()
    await shared.drained()
    assert [row["outcome"] for row in await account.log()] == ["delivered"] * 3 + ["failed"]


async def test_an_event_that_another_worker_has_claimed_is_not_sent(own: Queue, receiver: FakeReceiver) -> None:
    """It waited behind another one, for so long that this worker seemed dead."""
    account = await own.account(receiver)
    path, answering = f"/{account.id}", asyncio.Event()
    stream = stream_key(partition_tag(account.id), "events")
    receiver.plays(path, answering, OK)
    async with sending(own):
        first, claimed = await account.emit(), await account.emit()
        await wait_until(lambda: receiver.got(path))
        entries = await wait_until(lambda: own.store.client.xrange(stream), holds=lambda found: len(found) == 2)
        [entry] = [entry for entry, fields in entries if fields["id"] == claimed]
        await wait_until(lambda: own.store.client.xpending_range(stream, "webhooks", entry, entry, 1))
        await own.store.client.xclaim(stream, "webhooks", "elsewhere-1", 0, [entry])
        answering.set()
        last = await account.emit()
        assert await account.outcome(last) == ("delivered", 204)
        assert receiver.ids(path) == {first: 1, last: 1}
        assert sorted(row["id"] for row in await account.log()) == sorted([first, last])
        assert await own.waiting() == 1


# Stopping


async def test_sigterm_finishes_deliveries_and_releases_the_rest(own: Queue, receiver: FakeReceiver) -> None:
    """Deliveries under way end and are logged. Other workers get the waiting events at once."""
    account = await own.account(receiver)
    answering = asyncio.Event()
    receiver.plays(f"/{account.id}", answering, OK)
    worker = await own.worker(GATEWAY_WEBHOOK_CLAIM_IDLE="30")
    ids = await account.emit_many(50)
    await wait_until(lambda: receiver.got(f"/{account.id}"))
    worker.signal(signal.SIGTERM)
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0.3)
    answering.set()
    assert await stopping == 0
    under_way = [exchange.header("x-service-delivery") for exchange in receiver.got(f"/{account.id}")]
    assert sorted(row["id"] for row in await account.log()) == sorted(map(str, under_way))
    assert len(under_way) < 50
    await own.worker(GATEWAY_WEBHOOK_CLAIM_IDLE="30")
    await own.drained(8)  # long before the claim time
    assert receiver.ids(f"/{account.id}") == dict.fromkeys(ids, 1)


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


INTERNAL, CLIENT, CONSUMER = 1, 3, 5
PATH = "/hooks/a-path-that-is-secret"


def described(span: Span) -> tuple[str, int, dict[str, object]]:
    return span.name, span.kind, span.attributes


async def test_each_delivery_has_one_trace(tmp_path: Path, receiver: FakeReceiver) -> None:
    async with queue(tmp_path) as running, FakeCollector() as collector:
        await running.worker(**collector.settings())

        async def deliver(account: Account) -> list[Span]:
            return await collector.wait_for_trace("capsule.delivery", await account.emit())

        account = await running.account(receiver.url(f"{PATH}?key=secret-in-the-query"))
        before = time.time_ns()
        root, *stages = await deliver(account)
        whole = {
            "capsule.delivery": receiver.got(f"{PATH}?key=secret-in-the-query")[0].header("x-service-delivery"),
            "capsule.event": CRASH.type,
            "capsule.account": account.id,
            "capsule.app": account.app.name,
            "capsule.outcome": "delivered",
        }
        attempt = {"capsule.attempt": 1, "http.request.method": "POST", "server.address": "127.0.0.1"}
        assert described(root) == ("deliver", CONSUMER, whole)
        assert [described(span) for span in stages] == [
            ("confirm", INTERNAL, {}),
            ("POST", CLIENT, {**attempt, "http.response.status_code": 204}),
            ("record", INTERNAL, {}),
        ]
        assert not any(span.failed for span in (root, *stages))
        assert before < root.began <= stages[0].began
        assert stages[-1].ended <= root.ended < time.time_ns()
        assert root.process["service.name"] == "capsule-workers"

        receiver.plays("/broken", answer(500, {"error": "secret-in-the-answer"}))
        root, _, post, _ = await deliver(await running.account(receiver, "/broken"))
        assert post.attributes == {**attempt, "http.response.status_code": 500, "error.type": "500"}
        assert (root.error, root.failed, post.failed, root.attributes["capsule.outcome"]) == (
            "500",
            True,
            True,
            "failed",
        )

        root, _, post, _ = await deliver(await running.account(f"http://127.0.0.1:{free_port()}{PATH}"))
        assert (root.error, root.failed) == ("connect", True)
        assert post.attributes == {**attempt, "error.type": "connect"}

        root, *stages = await deliver(running.unset_account())
        assert (root.error, root.failed, root.attributes["capsule.outcome"]) == ("no-receiver", False, "dropped")
        assert [span.name for span in stages] == ["confirm", "record"]

        hidden = {PATH, "secret-in", "oom", "exitCode", HEADER_SECRET, *running.confidential}
        assert not [text for text in hidden if text.encode() in collector.raw]
        running.confidential.add(HEADER_SECRET)


# Lanes, without Redis or sockets

_ids = itertools.count()


@pytest.fixture
def lanes() -> Lanes:
    return Lanes(lambda: 100.0)


def entry(account: str) -> Entry:
    return Entry("{p09}", str(next(_ids)), {"account": account})


def add(lanes: Lanes, account: str, count: int = 1) -> list[Entry]:
    entries = [entry(account) for _ in range(count)]
    assert all(lanes.add(each) for each in entries)
    return entries


def take_all(lanes: Lanes) -> list[tuple[Lane, Entry]]:
    return list(iter(lanes.take_entry, None))


def end(lanes: Lanes, lane: Lane, *, timed_out: bool = False) -> None:
    lanes.adapt_lane(lane, timed_out=timed_out)
    lanes.end_delivery(lane)


async def test_lanes_rotate_and_keep_their_order(lanes: Lanes) -> None:
    first, second = add(lanes, "a", 3), add(lanes, "b", 2)
    taken = []
    while some := take_all(lanes):
        taken += [found for _, found in some]
        for lane, _ in some:
            lanes.end_delivery(lane)  # without a result, so the number of concurrent deliveries stays the same
    assert taken == [first[0], second[0], first[1], second[1], first[2]]


async def test_concurrent_deliveries_double_up_to_a_bound_and_fall_to_one_after_one_timeout(lanes: Lanes) -> None:
    add(lanes, "a", 100)
    sizes = []
    for _ in range(5):
        some = take_all(lanes)
        sizes.append(len(some))
        end(lanes, some[0][0])
        for lane, _ in some[1:]:
            lanes.end_delivery(lane)
    assert sizes == [1, 2, 4, LANE_DELIVERIES, LANE_DELIVERIES]
    some = take_all(lanes)
    end(lanes, some[0][0], timed_out=True)
    for lane, _ in some[1:]:
        lanes.end_delivery(lane)
    assert len(take_all(lanes)) == 1


async def test_a_delivery_under_way_keeps_its_lane_and_an_emptied_one_starts_again_with_one(lanes: Lanes) -> None:
    add(lanes, "a")
    ((lane, _),) = take_all(lanes)
    add(lanes, "a", 2)
    assert take_all(lanes) == [], "one delivery until the first has ended"
    end(lanes, lane)
    last = take_all(lanes)
    assert len(last) == 2
    for lane, _ in last:
        end(lanes, lane)
    add(lanes, "a", 5)
    assert len(take_all(lanes)) == 1


async def test_deliveries_under_way_count_when_no_event_waits(lanes: Lanes) -> None:
    add(lanes, "a", 3)
    ((lane, _),) = take_all(lanes)
    end(lanes, lane)
    (ended, _), (hanging, _) = take_all(lanes)
    assert ended is hanging
    end(lanes, ended)
    add(lanes, "a", 9)
    assert len(take_all(lanes)) == 3, "four concurrent deliveries, and one is still under way"


async def test_the_longest_stalled_lane_drops_its_newer_half() -> None:
    now = [100.0]
    lanes = Lanes(lambda: now[0])
    add(lanes, "moved", 50)
    long, short = add(lanes, "a", 10), add(lanes, "b", 4)
    assert lanes.drop_stalled() == [], "no lane has stalled yet"
    now[0] += 2 * STALLED_SECONDS
    taken = lanes.take_entry()
    assert taken is not None
    end(lanes, taken[0])  # of "moved", in time
    add(lanes, "c", 100)  # created just now
    assert lanes.drop_stalled() == long[:4:-1]
    assert lanes.drop_stalled() == long[4:2:-1]
    assert lanes.drop_stalled() == short[:1:-1]


async def test_clear_keeps_only_deliveries_under_way(lanes: Lanes) -> None:
    add(lanes, "a", 5)
    add(lanes, "b", 5)
    ((lane, _), _) = take_all(lanes)
    lanes.clear()
    end(lanes, lane)
    assert take_all(lanes) == []
