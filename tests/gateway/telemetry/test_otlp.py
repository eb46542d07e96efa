"""Collectors that hang, drip, refuse or do not exist: no request waits for them, and memory stays bounded."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan

from gateway.telemetry.otlp import OtlpTracer
from gateway.telemetry.spans import Kind
from tests.fakes import FakeAppBackend
from tests.fakes.collector import HEADER_SECRET, FakeCollector
from tests.fakes.receiver import drip
from tests.fakes.server import HANG, answer
from tests.gateway.conftest import Launch
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-%b"
QUEUE, BATCH = 256, 64
CLOSE_SECONDS = 20  # the SDK waits 30, or as long as the collector keeps sending


@pytest_asyncio.fixture(loop_scope="session")
async def collector() -> AsyncIterator[FakeCollector]:
    async with FakeCollector() as collector:
        yield collector


@pytest.fixture
def _settings(collector: FakeCollector, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    settings = {"OTEL_BSP_MAX_QUEUE_SIZE": str(QUEUE), "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": str(BATCH)}
    for name, value in collector.settings(**settings, **getattr(request, "param", {})).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def tracer(_settings: None) -> OtlpTracer:
    return OtlpTracer("test", flush_seconds=0.5)


def record_trace(tracer: OtlpTracer, stages: int = 3) -> bool:
    """Records a trace. Returns whether the sampler accepts it."""
    trace = tracer.begin("work", Kind.INTERNAL)
    if not trace.recorded:
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
    assert record_trace(tracer)
    await wait_until(lambda: collector.exchanges, 10)
    before = spans_in_memory()
    for _ in range(QUEUE):
        assert record_trace(tracer)
    assert spans_in_memory() - before <= QUEUE + BATCH
    assert await close(tracer) < CLOSE_SECONDS


@pytest.mark.parametrize(
    ("_settings", "alone", "sampled", "unsampled"),
    [
        ({}, 64, True, False),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 0, False, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, 0, True, False),
    ],
    ids=["default", "off", "the caller's"],
    indirect=["_settings"],
)
async def test_the_sampler_decides(tracer: OtlpTracer, alone: int, sampled: bool, unsampled: bool) -> None:
    assert sum(record_trace(tracer) for _ in range(64)) == alone
    assert tracer.begin("work", Kind.SERVER, traceparent=PARENT % b"01").recorded == sampled
    assert tracer.begin("work", Kind.SERVER, traceparent=PARENT % b"00").recorded == unsampled
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
