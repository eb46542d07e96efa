"""The client of the model provider: its credential, the pool of connections, and the probe.

A sweep counts the time of all streams and connections; there is no timer for each, and the token path reads no clock.
"""

import asyncio
import contextlib
from urllib.parse import urlsplit

import httpx

from gateway.errors import ProviderUnreachable
from gateway.inference.provider.connection import Interrupted, ProviderConnection, Stream
from gateway.inference.provider.connector import Connector, causes, is_local_shortage
from gateway.inference.provider.errors import ProviderSignal
from gateway.loops import every
from gateway.settings import ProviderSettings, Settings
from gateway.telemetry.spans import Value

SWEEPS = 20  # within the shortest time limit. Each costs 1.7 µs per open stream, silent or not
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 0.5  # between two sweeps
LATE_SECONDS = 1.0  # a longer time between two sweeps means that this process stood still
MAX_IDLE_CONNECTIONS = 2_048
PROBE_SECONDS = 10.0  # that a probe may take


class Provider:
    def __init__(self, settings: Settings, chosen: ProviderSettings, *, max_idle: int = MAX_IDLE_CONNECTIONS) -> None:
        self._settings, self._chosen, self._max_idle = settings, chosen, max_idle
        self.streams: set[Stream] = set()  # running exchanges
        self._connections: set[ProviderConnection] = set()
        self._idle: list[ProviderConnection] = []  # the most recently used last; the last one is used first
        self._tls = httpx.create_ssl_context(trust_env=False)
        if settings.ca_file:
            self._tls.load_verify_locations(settings.ca_file)
        parts = urlsplit(chosen.url)
        tls = self._tls if parts.scheme == "https" else None
        host, port = parts.hostname or "", parts.port or (443 if tls else 80)
        self._connector = Connector(host, port, tls, lambda: ProviderConnection(self))
        # OpenAI's format does not identify a provider, so its host is its name.
        self.span_attributes: dict[str, Value] = {
            "gen_ai.provider.name": host,
            "server.address": host,
            "server.port": port,
        }
        self._interrupted = False
        self._key: str | None = None
        self.read_key()

    # -- the credential --------------------------------------------------------------------------------------

    def read_key(self) -> bool:
        """Reads the key again, so that a replaced one takes effect. Returns whether it is another one."""
        before, self._key = self._key, self._chosen.read_key()
        if before == self._key:
            return False
        parts = urlsplit(self._chosen.url)
        self._head = (
            f"POST {parts.path.rstrip('/')}/chat/completions HTTP/1.1\r\n"
            f"host: {parts.netloc.rpartition('@')[2]}\r\n"
            f"authorization: Bearer {self._key}\r\n"
            "content-type: application/json\r\n"
            "accept: text/event-stream\r\n"
            "accept-encoding: identity\r\n"
            "user-agent: capsule-gateway\r\n"
            "content-length: "
        ).encode()
        return True

    def is_configured(self) -> bool:
        """Returns whether there is a key."""
        return bool(self._key)

    # -- requests --------------------------------------------------------------------------------------------

    async def connect(self) -> ProviderConnection:
        """Returns an idle connection, reused or new. Raises ProviderUnreachable or ConnectionsExhausted."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable():
                return connection
        try:
            async with asyncio.timeout(self._settings.provider_timeouts.connect):
                connection = await self._connector.connect()
        except (OSError, UnicodeError) as error:  # an invalid host name cannot be encoded
            raise ProviderUnreachable from error
        if not connection.is_usable():
            raise ProviderUnreachable  # closed in between
        self._connections.add(connection)
        return connection

    def post(self, connection: ProviderConnection, payload: bytes) -> Stream:
        """Sends a completion request on a connection that `connect` returned. Close the stream with `close_stream`.

        Raises Interrupted, and sends nothing, if this process is about to stop.
        """
        if self._interrupted:
            connection.abort()
            raise Interrupted
        stream = connection.post(self._head, payload)
        self.streams.add(stream)
        return stream

    def close_stream(self, stream: Stream) -> None:
        self.streams.discard(stream)
        stream.close()

    # -- the pool --------------------------------------------------------------------------------------------

    def keep(self, connection: ProviderConnection) -> None:
        """Keeps an idle connection for the next request."""
        if len(self._idle) < self._max_idle:
            self._idle.append(connection)
        else:
            connection.abort()

    def forget(self, connection: ProviderConnection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    # -- for the life of the process -------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Times streams and connections out."""
        loop = asyncio.get_running_loop()
        timeouts, keep_alive = self._settings.provider_timeouts, self._settings.keep_alive
        pause = pause_between_sweeps(timeouts.first, timeouts.idle, timeouts.total, keep_alive)
        before = loop.time()

        async def tick() -> None:
            nonlocal before
            now = loop.time()
            passed, before = now - before, now
            late = passed - pause if passed > LATE_SECONDS else 0.0
            for stream in list(self.streams):
                stream.tick(passed, timeouts, keep_alive, late)
            for connection in list(self._connections):
                connection.tick(passed)

        await every(pause, tick, first=pause)

    def interrupt(self) -> None:
        """Ends all streams and starts no new ones, because this process is about to stop."""
        self._interrupted = True
        for stream in list(self.streams):
            stream.fail(Interrupted())

    def close(self) -> None:
        for connection in list(self._connections):
            connection.abort()

    async def probe(self) -> ProviderSignal | None:
        """Sends a GET /models. Returns None if this machine could not send it."""
        self.read_key()
        try:
            async with (
                asyncio.timeout(PROBE_SECONDS),
                httpx.AsyncClient(verify=self._tls, trust_env=False) as client,
                client.stream(
                    "GET",
                    f"{self._chosen.url}/models",
                    headers={"authorization": f"Bearer {self._key}"},
                ) as response,
            ):
                status = response.status_code
        except (httpx.HTTPError, OSError) as error:
            return None if is_local_shortage(causes(error)) else ProviderSignal.FAILED
        if status in (401, 403):
            return ProviderSignal.REFUSED
        if status == 402:
            return ProviderSignal.QUOTA
        return ProviderSignal.FAILED if status >= 500 else ProviderSignal.REACHED


def pause_between_sweeps(*limits: float) -> float:
    return min(max(min(limits) / SWEEPS, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
