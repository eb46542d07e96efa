"""Collectors that hang, drip, refuse or are not there: no request waits for one, no memory fills, no stop is late."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan

from gateway.telemetry import otlp
from gateway.telemetry.otlp import OtlpTracer
from gateway.telemetry.spans import Kind
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.collector import HEADER_SECRET, FakeCollector
from tests.fakes.receiver import drip
from tests.fakes.server import HANG, answer
from tests.gateway.conftest import Launch
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")

PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-%b"
QUEUE, BATCH = 256, 64
SOON_ENOUGH = 20  # seconds; the SDK waits 30, or for as long as the collector keeps on sending


@pytest_asyncio.fixture(loop_scope="session")
async def collector() -> AsyncIterator[FakeCollector]:
    async with FakeCollector() as collector:
        yield collector


@pytest.fixture
def tracer(collector: FakeCollector, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> OtlpTracer:
    settings = {"OTEL_BSP_MAX_QUEUE_SIZE": str(QUEUE), "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": str(BATCH)}
    for name, value in collector.settings(**settings, **getattr(request, "param", {})).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(otlp, "FLUSH_SECONDS", 0.5)
    return OtlpTracer("test")


def trace_of(tracer: OtlpTracer, stages: int = 3) -> bool:
    """Whether the sampler takes it."""
    trace = tracer.begin("work", Kind.INTERNAL)
    if trace is None:
        return False
    for number in range(stages):
        trace.enter(f"stage {number}")
    trace.finish()
    return True


def spans_in_memory() -> int:
    gc.collect()
    return sum(isinstance(each, ReadableSpan) for each in gc.get_objects())


async def close(tracer: OtlpTracer) -> float:
    began = time.monotonic()
    await asyncio.to_thread(tracer.close)
    return time.monotonic() - began


@pytest.mark.parametrize("plays", [[HANG], drip(b"HTTP/1.1 200 OK\r\n" * 99, 0.5)], ids=["hangs", "drips"])
async def test_a_collector_that_does_not_answer(tracer: OtlpTracer, collector: FakeCollector, plays: list) -> None:
    collector.plays = plays
    assert trace_of(tracer)
    await wait_until(lambda: collector.exchanges, 10)
    before = spans_in_memory()
    for _ in range(QUEUE):
        assert trace_of(tracer)
    assert spans_in_memory() - before <= QUEUE + BATCH
    assert await close(tracer) < SOON_ENOUGH


@pytest.mark.parametrize("tracer", [{"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}], indirect=True)
async def test_a_collector_that_is_not_there(tracer: OtlpTracer) -> None:
    for _ in range(2 * QUEUE):
        assert trace_of(tracer)
    assert await close(tracer) < SOON_ENOUGH


async def test_what_waits_is_sent_at_the_end(
    tracer: OtlpTracer, collector: FakeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "FLUSH_SECONDS", 20)
    for _ in range(QUEUE // 4):
        assert trace_of(tracer)
    await close(tracer)
    assert len(collector.spans) == QUEUE
    assert len({span.id for span in collector.spans}) == QUEUE
    assert len({span.trace for span in collector.spans}) == QUEUE // 4
    assert trace_of(tracer), "late work is no error"


@pytest.mark.parametrize(
    ("tracer", "alone", "sampled", "unsampled"),
    [
        ({}, 64, True, False),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 0, False, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, 0, True, False),
        ({"OTEL_TRACES_SAMPLER": "nonsense"}, 64, True, False),
    ],
    ids=["default", "off", "the caller's", "nonsense"],
    indirect=["tracer"],
)
async def test_the_sampler_decides(tracer: OtlpTracer, alone: int, sampled: bool, unsampled: bool) -> None:
    assert sum(trace_of(tracer) for _ in range(64)) == alone
    assert (tracer.begin("work", Kind.SERVER, traceparent=PARENT % b"01") is not None) == sampled
    assert (tracer.begin("work", Kind.SERVER, traceparent=PARENT % b"00") is not None) == unsampled
    await close(tracer)


@pytest.mark.parametrize(
    "tracer", [{"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}], indirect=True
)
async def test_a_share_of_all_traces(tracer: OtlpTracer) -> None:
    assert 0 < sum(trace_of(tracer) for _ in range(64)) < 64
    await close(tracer)


async def test_a_gateway_does_not_notice_a_broken_collector(
    launch: Launch, backend: FakeAppBackend, collector: FakeCollector
) -> None:
    collector.plays = answer(401, {"message": HEADER_SECRET})
    settings = collector.settings(OTEL_BSP_MAX_QUEUE_SIZE="64", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="16")
    async with launch(**settings) as gw:
        gw.confidential |= {HEADER_SECRET, collector.address}
        apps = [await gw.app(backend) for _ in range(3)]
        assert (await apps[0].ask("x")).status_code == 200
        await wait_until(lambda: "traces.lost" in gw.log, 10)
        collector.plays = [HANG]
        refused = len(collector.exchanges)
        for _ in range(15):
            answers = await asyncio.gather(*(app.ask("x") for app in apps))
            assert [answer.status_code for answer in answers] == [200] * 3
        await wait_until(lambda: len(collector.exchanges) > refused, 10)
        assert await gw.stop() is not None, "it had to be killed"
        assert gw.log.count("traces.lost") == 1
        assert "Finished server process" in gw.log


async def test_each_of_several_processes_sends_what_it_has_at_the_end(
    valkey: RedisServer, provider: FakeProvider, backend: FakeAppBackend, collector: FakeCollector, tmp_path: Path
) -> None:
    settings = collector.settings(OTEL_BSP_SCHEDULE_DELAY="3600000")
    gw = Gateway(valkey.url, provider, tmp_path, **settings)
    gw.workers = 2
    try:
        await gw.start()
        app = await gw.app(backend)
        asked = [(await app.ask("x")).headers["X-Request-Id"] for _ in range(10)]
        assert not collector.exchanges
        assert await gw.stop() == 0
    finally:
        await gw.stop()
        await gw.http.aclose()
    roots = {span.attributes.get("capsule.request_id") for span in collector.spans if not span.parent}
    assert roots == {*asked}
    gw.assert_log_is_clean()
