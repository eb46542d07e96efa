"""Finds out whether a release is up: whether it answers a request as `Release.is_up` says.

Where a start command listens instead, its relay knows (`workers/sandbox/relay.py`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta

from gateway.deploys.release import Release
from gateway.deploys.states import DeployError

REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=10)
LOOK_SECONDS = 1.0  # between questions where a start command listens
ELSEWHERE_SECONDS = 10.0  # that it listens only elsewhere, after which it is given up


class NotUp(DeployError):
    """A request shows that a release is not up. `status`: of the answer, or 0 if there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Listening(msgspec.Struct, frozen=True):
    """Where a start command listens, as its relay says."""

    port: int  # where it should
    reached: bool  # whether it has accepted a connection there
    addresses: list[Annotated[str, Meta(max_length=64)]] = []

    def explain(self) -> str:
        """Says what is wrong with these addresses."""
        hosts = [each for each in self.addresses if each.endswith(f":{self.port}")]
        ports = dict.fromkeys(each.rpartition(":")[2] for each in self.addresses)
        wanted = "$HOST (127.0.0.1)" if hosts else f"$PORT ({self.port})"
        return f"It listens at {' and '.join(hosts or ports)}; listen at {wanted}."


async def request_health(release: Release, url: str, host: str, connector: aiohttp.BaseConnector | None = None) -> None:
    """Sends a release that answers at this URL the request of its health check. Raises NotUp."""
    what = f"GET {release.health_path}"
    try:
        async with (
            aiohttp.ClientSession(timeout=REQUEST_TIMEOUT, connector=connector) as client,
            client.get(f"{url}{release.health_path}", headers={"Host": host}, allow_redirects=False) as answer,
        ):
            status = answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        late = isinstance(error, TimeoutError)
        raise NotUp(f"{what} timed out" if late else f"{what} got no answer") from None
    if not release.is_up(status):
        raise NotUp(f"{what} returned {status}", status)


async def until_up(
    release: Release,
    request: Callable[[], Awaitable[None]],
    find_listening: Callable[[], Awaitable[Listening | None]],
    require_running: Callable[[], None],
    *,
    seconds: float,
    poll_seconds: float,
) -> None:
    """Waits until a start command that was started is up. Raises DeployError.

    `request` raises NotUp. `find_listening` returns None while it is not known. `require_running` raises DeployError.
    """
    ends = time.monotonic() + seconds
    look_at, elsewhere_since = 0.0, float("inf")
    failure, listening = NotUp(""), None
    asking = asyncio.ensure_future(request())
    try:
        while True:
            await asyncio.wait([asking], timeout=poll_seconds)
            require_running()
            if asking.done():
                try:
                    return await asking
                except NotUp as error:
                    failure = error
                await asyncio.sleep(poll_seconds)
                asking = asyncio.ensure_future(request())
            now = time.monotonic()
            if now >= look_at:
                look_at, listening = now + min(LOOK_SECONDS, ELSEWHERE_SECONDS), await find_listening()
                is_elsewhere = listening is not None and not listening.reached and bool(listening.addresses)
                elsewhere_since = min(elsewhere_since, now) if is_elsewhere else float("inf")
            if listening is not None and now > elsewhere_since + ELSEWHERE_SECONDS:
                raise DeployError(listening.explain())
            if now > ends:
                raise DeployError(_explain(release, failure, listening, f"{seconds:.0f} seconds"))
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def _explain(release: Release, failure: NotUp, listening: Listening | None, limit: str) -> str:
    if listening is not None and not listening.reached:
        missing = f"the start command did not answer within {limit}: nothing listens at $PORT ({listening.port})"
        return listening.explain() if listening.addresses else missing
    if failure.status:
        wanted = "; it must answer with 2xx or 3xx" if release.health else ""
        return f"the start command still answered {failure.status} to GET {release.health_path} after {limit}{wanted}"
    return f"the start command did not answer within {limit}: {failure}"
