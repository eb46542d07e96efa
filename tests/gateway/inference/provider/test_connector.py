"""Connecting to a provider with several addresses, some of them dead, with real sockets on uvloop."""

import asyncio
import contextlib
import errno
import gc
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import uvloop

from gateway.errors import BackboneUnavailable, ProviderUnreachable, ServiceError
from gateway.inference.provider import connector
from gateway.inference.provider.pool import Provider
from gateway.settings import ProviderTimeouts, Settings
from tests.fakes import FakeProvider
from tests.fakes.receiver import certificate
from tests.support.redis_servers import free_port

Address = tuple[str, int]


class Resolving(uvloop.Loop):
    """An event loop that resolves every name to these addresses, or fails with this error."""

    addresses: ClassVar[list[Address]] = []
    next_addresses: ClassVar[list[Address]] = []  # if any, those of later lookups
    error: ClassVar[OSError | None] = None
    lookups: ClassVar[int] = 0

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        Resolving.lookups += 1
        if Resolving.lookups > 1 and self.next_addresses:
            Resolving.addresses = self.next_addresses
        if self.error is not None:
            raise self.error
        if not self.addresses:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in self.addresses]


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def run() -> Iterator[Run]:
    Resolving.lookups, Resolving.next_addresses, Resolving.error = 0, [], None
    with asyncio.Runner(loop_factory=Resolving) as runner:
        yield runner.run
    gc.collect()  # an abandoned socket would fail the test as a ResourceWarning


@contextlib.contextmanager
def black_hole() -> Iterator[Address]:
    """Yields an address that never answers: its backlog is full, so the kernel drops further connections."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.2", 0))
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()


@contextlib.asynccontextmanager
async def listening(
    connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> AsyncIterator[Address]:
    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()


def refusing() -> Address:
    return ("127.0.0.1", free_port())


async def connect(url: str, addresses: list[Address], **settings: Any) -> tuple[ServiceError | None, float]:
    """Connects, and returns the failure, if any, and the seconds that it took."""
    Resolving.addresses = addresses
    timeouts = ProviderTimeouts(**settings.pop("timeouts", {"connect": 2}))
    chosen = Settings(provider_url=url, provider_key="k", provider_timeouts=timeouts, **settings)
    provider = Provider(chosen, chosen.providers[0])
    began = time.monotonic()
    try:
        await provider.connect()
    except ServiceError as error:
        return error, time.monotonic() - began
    finally:
        passed = time.monotonic() - began
        provider.close()
        await asyncio.sleep(0.02)
    return None, passed


def test_addresses_that_are_black_holes(run: Run) -> None:
    """The next address is tried soon, so the provider is reached."""

    async def scenario() -> None:
        async with FakeProvider() as provider:
            with black_hole() as one, black_hole() as two:
                failure, passed = await connect("http://model.test/v1", [one, two, ("127.0.0.1", provider.port)])
            assert failure is None
            assert 0.4 < passed < 1.5
            refused = [refusing() for _ in range(connector.MAX_ADDRESSES - 1)]
            failure, passed = await connect("http://model.test/v1", [*refused, ("127.0.0.1", provider.port)])
            assert failure is None
            assert passed < connector.ATTEMPT_DELAY_SECONDS * len(refused), "a refusal costs no time"
        with black_hole() as one, black_hole() as two:
            failure, passed = await connect("http://model.test/v1", [one, two], timeouts={"connect": 1.5})
        assert isinstance(failure, ProviderUnreachable)
        assert 1.4 < passed < 2.9, "one limit holds for all addresses and both tries"

    run(scenario())


def test_a_first_address_that_accepts_and_then_hangs(run: Run, tmp_path: Path) -> None:
    """With a load balancer without its backend, TCP connects, but TLS never does."""
    context, file = certificate(tmp_path, "model.test")

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(-1)
        writer.close()

    async def scenario() -> None:
        async with FakeProvider(context) as provider, listening(hang) as hanging:
            addresses = [hanging, ("127.0.0.1", provider.port)]
            failure, passed = await connect("https://model.test/v1", addresses, ca_file=file)
            assert failure is None
            assert 0.2 < passed < 1.8
            failure, _ = await connect("https://other.test/v1", addresses[1:], ca_file=file)
            assert isinstance(failure, ProviderUnreachable), "the name is checked at every address"
            failure, _ = await connect("https://model.test/v1", addresses[1:])
            assert isinstance(failure, ProviderUnreachable), "the authority is not trusted by default"

    run(scenario())


def test_a_connection_that_fails_is_tried_once_more(run: Run) -> None:
    """A provider that restarts refuses connections for a moment, and nothing of the request was sent."""

    async def scenario() -> None:
        failure, passed = await connect("http://model.test/v1", [refusing()], timeouts={"connect": 10})
        assert isinstance(failure, ProviderUnreachable)
        assert (Resolving.lookups, passed < 5) == (2, True)
        failure, _ = await connect("http://model.test/v1", [])
        assert isinstance(failure, ProviderUnreachable)
        assert Resolving.lookups == 4, "a name that could not be resolved too"
        async with FakeProvider() as provider:
            Resolving.lookups, Resolving.next_addresses = 0, [("127.0.0.1", provider.port)]
            failure, _ = await connect("http://model.test/v1", [refusing()])
        assert (failure, Resolving.lookups) == (None, 2)

    run(scenario())


def test_families_alternate() -> None:
    """A broken family costs one delay, not one for each of its addresses (RFC 8305, section 4)."""
    six, four = [(socket.AF_INET6, n) for n in range(3)], [(socket.AF_INET, n) for n in range(2)]
    mixed = [six[0], four[0], six[1], four[1], six[2]]
    assert connector.interleave([*six, *four]) == mixed
    assert connector.interleave([*six, *four], first=socket.AF_INET) == [four[0], six[0], four[1], six[1], six[2]]
    assert connector.interleave([*four, *six], first=socket.AF_INET6) == mixed
    assert connector.interleave(four, first=socket.AF_INET6) == four


@pytest.mark.parametrize(
    ("errors", "ours"),
    [
        ([errno.ECONNREFUSED, errno.ENFILE], True),
        ([errno.EADDRNOTAVAIL], True),
        ([errno.EADDRNOTAVAIL, errno.ECONNREFUSED], False),
        ([None], False),
    ],
)
def test_a_local_shortage_is_not_the_providers_failure(errors: list[int], ours: bool) -> None:
    assert connector.is_local_shortage([OSError(number, "x") for number in errors]) is ours


def test_a_shortage_of_descriptors_is_not_tried_again(run: Run) -> None:
    async def scenario() -> None:
        Resolving.error = OSError(errno.EMFILE, "Too many open files")
        failure, _ = await connect("http://model.test/v1", [])
        assert isinstance(failure, BackboneUnavailable)
        assert (failure.status, failure.code, failure.retry_after) == (503, "BACKBONE_UNAVAILABLE", 1)
        assert "store" not in failure.message
        assert Resolving.lookups == 1

    run(scenario())
