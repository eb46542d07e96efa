"""The delivery log over HTTP: its pages, its filters, and the details of each delivery."""

import json
from typing import Any

import pytest

from gateway.events.deliveries import KEPT_BODY_BYTES, READ_BODY_BYTES, summarize_answer
from gateway.keys import bodies_key, deliveries_key
from tests.fakes.receiver import FakeReceiver, verified
from tests.fakes.server import HANG, Head, Raw, Script, answer
from tests.support.redis_servers import free_port
from tests.support.responses import refused
from tests.support.webhook_holder import DELIVERIES, Holder
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def detail(holder: Holder, delivery_id: str) -> dict[str, Any]:
    response = await holder.call("GET", f"{DELIVERIES}/{delivery_id}")
    assert response.status_code == 200, response.text
    assert not holder.secret or holder.secret not in response.text
    return response.json()


async def delivered(holder: Holder, receiver: FakeReceiver, script: Script, kind: str = "app.crashed") -> str:
    receiver.plays(holder.path, script)
    before = len(await holder.log())
    event_id = await holder.test(kind)
    await holder.logged(before + 1)
    return event_id


# One delivery


async def test_a_delivery_with_its_request_and_response(holder: Holder, worker: Worker, receiver: FakeReceiver) -> None:
    holder.path += "?token=abc"
    await holder.set(receiver.url(holder.path))
    event_id = await delivered(holder, receiver, answer(422, {"why": "é"}, {"X-Trace": "t1"}))
    shown = await detail(holder, event_id)
    [row] = await holder.log()
    assert {name: shown[name] for name in row} == row
    assert shown["url"] == receiver.url(holder.path)
    (exchange,) = receiver.got(holder.path)
    assert shown["request"]["body"].encode() == exchange.body, "the very bytes"
    verified(exchange, holder.secret)
    for name, value in shown["request"]["headers"].items():
        if name.lower().endswith("signature"):
            assert value in ("sha256=(not kept)", "v1,(not kept)")
            assert exchange.header(name).split("=")[0].split(",")[0] in value
        else:
            assert exchange.header(name) == value, name
    assert len(shown["request"]["headers"]) == 8
    assert shown["response"] == {
        "status": 422,
        "headers": {"Content-Type": "application/json", "Content-Length": "17", "X-Trace": "t1"},
        "body": json.dumps({"why": "é"}),
    }


async def test_what_is_kept_of_a_response(holder: Holder, worker: Worker, receiver: FakeReceiver) -> None:
    """Bytes that are not UTF-8, even in headers, harm neither the log nor the worker."""
    await holder.set()
    long = b"a" * 1000 + b"b" * 100_000
    many = {f"X-{n}": "v" * 200 for n in range(20)}
    shown = await detail(holder, await delivered(holder, receiver, answer(500, long, many)))
    assert shown["response"]["body"] == "a" * 1000 + "b" * (KEPT_BODY_BYTES - 1000)
    assert len(json.dumps(shown["response"]["headers"])) < 2000
    slow = await detail(holder, await delivered(holder, receiver, [Head(200), b"first", HANG]))
    assert (slow["outcome"], slow["response"]["body"]) == ("delivered", "first"), "the part that arrived in time"
    raw = b"HTTP/1.1 500 \xff\r\nX-Odd: a\xff\xfeb\r\nX-Odd: c\r\nContent-Length: 4\r\n\r\n\x00\xff\x1bz"
    shown = await detail(holder, await delivered(holder, receiver, [Raw(raw)]))
    assert shown["response"]["headers"]["X-Odd"] == "a\ufffd\ufffdb, c"
    assert shown["response"]["body"] == "\x00\ufffd\x1bz"


async def test_deliveries_without_a_receiver_or_a_response(holder: Holder, worker: Worker) -> None:
    async def storage() -> dict[str, int]:
        return (await holder.call("GET", "/account")).json()["storage"]

    assert await storage() == {"bytes": 0, "limit": 8_388_608}
    event_id = await holder.test()
    await holder.logged(1)
    assert 300 < (await storage())["bytes"] < 2_000
    dropped = await detail(holder, event_id)
    assert (dropped["error"], dropped["url"], dropped["response"]) == ("no-receiver", None, None)
    assert dropped["request"]["headers"] == {}
    assert json.loads(dropped["request"]["body"])["id"] == event_id
    url = f"http://127.0.0.1:{free_port()}/"
    await holder.set(url)
    event_id = await holder.test()
    await holder.logged(2)
    failed = await detail(holder, event_id)
    assert (failed["error"], failed["url"], failed["response"]) == ("connect", url, None)


async def test_each_delivery_of_an_event(holder: Holder, worker: Worker, receiver: FakeReceiver) -> None:
    """An event's id shows its newest delivery, and an attempt shows that delivery."""
    await holder.set()
    event_id = await delivered(holder, receiver, answer(500, b"first"))
    receiver.plays(holder.path, answer(200, b"second"))
    response = await holder.call("POST", f"{DELIVERIES}/{event_id}/redeliver")
    assert (response.status_code, response.json()) == (202, {"id": event_id})
    new, old = await holder.logged(2)
    assert [(row["outcome"], row["sample"], row["redelivery"]) for row in (new, old)] == [
        ("delivered", True, 1),
        ("failed", True, 0),
    ]
    assert new["eventAt"] == old["eventAt"] <= old["at"] < new["at"]
    sent, again = (verified(exchange, holder.secret) for exchange in receiver.got(holder.path))
    assert again["timestamp"] > sent["timestamp"]
    assert {**again, "timestamp": 0} == {**sent, "timestamp": 0}
    assert (await detail(holder, event_id))["response"]["body"] == "second"
    assert (await detail(holder, new["attempt"]))["response"]["body"] == "second"
    assert (await detail(holder, old["attempt"]))["response"]["body"] == "first"
    with holder.account.gateway.redis.client() as client:
        assert client.hlen(bodies_key(holder.id)) == 2, "one copy of the data, and its number of references"


async def test_an_unknown_delivery(holder: Holder) -> None:
    for unknown in ("evt_unknown", "1-1", "99999999999999999999999-1", "%FF", "x" * 500, "evt%0D%0AX-Evil:%201"):
        refused(await holder.call("GET", f"{DELIVERIES}/{unknown}"), 404, "NOT_FOUND")


# The list


def fill(holder: Holder, count: int) -> None:
    """Writes deliveries of two types, two apps and three outcomes; each event has two in a row."""
    key = deliveries_key(holder.id)
    with holder.account.gateway.redis.client() as client:
        now = int(client.time()[0]) * 1000
        for number in range(count):
            fields = {"id": f"evt_{number // 2}", "at": now, "durationMs": 5, "status": "", "error": ""}
            fields["type"] = ("app.crashed", "deploy.failed")[number % 2]
            fields["app"] = ("shop", "notes")[number // 2 % 2]
            fields["outcome"] = ("delivered", "failed", "dropped")[number % 3]
            client.xadd(key, fields, id=f"{now}-{number + 1}")
        client.expire(key, 600)


async def test_pages_and_filters(holder: Holder) -> None:
    fill(holder, 230)
    whole = await holder.log("?limit=1000")
    paged: list[dict[str, Any]] = []
    while page := await holder.log(f"?limit=50&before={paged[-1]['attempt'] if paged else ''}"):
        paged += page
    assert paged == whole
    assert len(whole) == 230
    assert [row["id"] for row in whole[28:30]] == ["evt_100"] * 2
    assert await holder.log("?limit=1000&before=evt_100") == whole[30:], "after its oldest delivery"
    for chosen in (
        {"type": "app.crashed"},
        {"app": "notes"},
        {"outcome": "failed"},
        {"type": "deploy.failed", "app": "shop", "outcome": "dropped"},
    ):
        query = "&".join(f"{name}={value}" for name, value in chosen.items())
        expected = [row for row in whole if all(row[name] == value for name, value in chosen.items())]
        assert await holder.log(f"?limit=1000&{query}") == expected
        assert await holder.log(f"?limit=7&{query}") == expected[:7]
        assert await holder.log(f"?limit=7&{query}&before={expected[6]['attempt']}") == expected[7:14]
    assert await holder.log("?app=nobody") == []
    assert await holder.log("?limit=7&app=") == whole[:7]

    for query in ("before=evt_unknown", "type=app.bored", "outcome=lost", "since=lately", "since=1h&until=2h"):
        response = await holder.call("GET", f"{DELIVERIES}?{query}")
        assert query.partition("=")[0] in refused(response, 400, "REQUEST_MALFORMED")["message"]


SECRET = "whsec_ab/cd+ef/0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcde="


@pytest.mark.parametrize(
    "escapes",
    [
        {"/": r"\/"},  # PHP
        {"+": r"\u002B", "=": r"\u003d"},
        {"/": r"\\\/"},  # JSON in JSON
        {"/": "%2F", "+": "%2b", "=": "%3D"},
        {"/": "%252F"},
        {"/": "&#x2F;", "+": "&#43;", "=": "&#x003d;"},
        {"+": "&amp;#43;"},
    ],
)
async def test_an_escaped_secret_is_left_out(escapes: dict[str, str | int | None]) -> None:
    """A receiver may print its environment as JSON, in a URL or as HTML."""
    printed = SECRET.translate(str.maketrans(escapes))
    headers, body = summarize_answer([("X-Env", printed)], f"key={printed}; {printed[:-9]}".encode(), [SECRET])
    assert (headers, body) == ('{"X-Env":"(not kept)"}', "key=(not kept); (not kept)")


async def test_a_secret_is_left_out_wherever_the_body_is_cut_off() -> None:
    """The secrets that were replaced before it make it move into the part that is kept."""
    signatures = [letter * 64 for letter in "abc"]
    printed = SECRET.replace("/", r"\/").replace("+", "&#x2B;")
    for secret in (SECRET, printed):
        for at in range(READ_BODY_BYTES - 8, READ_BODY_BYTES - len(secret) - 2, -1):
            body = " ".join(signatures).ljust(at) + secret + "."
            kept = summarize_answer([], body.encode()[:READ_BODY_BYTES], [SECRET, *signatures])[1]
            assert "whsec_ab" not in kept, at


async def test_what_is_kept_without_a_secret() -> None:
    """Escapes are kept, and a header that is too long is left out."""
    assert summarize_answer([("a", "x" * 2000), ("b", "y")], b"", []) == ("", "")
    body = r"a\/b %2F &#47; whsec_ \n"
    assert summarize_answer([], body.encode(), [SECRET]) == ("", body)
