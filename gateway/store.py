"""Redis: the client, every key name, and the scripts.

| key | type | holds | ends |
| --- | --- | --- | --- |
| `app:<name>` | string | an app's record, JSON | when the app is deleted |
| `alias:<id>` | string | the name of the app of this id, when they differ | when the app is deleted |
| `key:<sha256>` | string | the account an API key belongs to | when the key is withdrawn |
| `inference` | string | the runtime switch and the approval, JSON | never: one record |
| `provider` | string | what was learnt of the provider, JSON | never: one record |
| `probe` | string | which process probes the provider now | 20 s |
| `{pNN}:account:<id>` | string | an account's record, JSON | with the account |
| `{pNN}:account:<id>:apps` | set | names of its apps | with the account |
| `{pNN}:window:app:<id>` | list | when the requests of the last minute passed, µs | 60 s |
| `{pNN}:window:user:<id>:<hash>` | list | the same for one user of the app | 60 s |
| `{pNN}:spend:<account>:<day>` | hash | `settled`, `reserved`: nano-euro of a UTC day | 35 days |
| `{pNN}:reservations` | hash | id → `<account> <day> <nano-euro>` | each when settled |
| `{pNN}:leases` | zset | reservation ids by the end of their lease, ms | each when settled |
| `{pNN}:webhook:<account>` | string | the account's receiver, JSON; its secret sealed | when it is cleared |
| `{pNN}:events` | stream | events that wait for their outcome; group `webhooks` | each at its outcome; 100,000 |
| `{pNN}:deliveries:<account>` | stream | outcomes of deliveries, the last 1,000 | 30 days |
| `{pNN}:outcomes` | hash | outcome → how often | never: a dozen fields |
| `hook:<sha256>` | string | a deploy hook, JSON | when it is revoked |
| `{pNN}:hooks:<account>` | hash | hook id → its hash and record, JSON | each when revoked; 100 |
| `{pNN}:hooks-used:<account>` | hash | hook id → when it was last used, ms | each when revoked |
| `{pNN}:window:hook:<id>` | list | when a hook's triggers of the last minute came, µs | 60 s |
| `{pNN}:probes` | zset | app ids by when their next uptime probe is due, ms | with the app |
| `{pNN}:certificates` | zset | app ids by when their domain's certificate is looked at next, ms | with the app |
| `{pNN}:health:<app id>` | hash | `version`, `state`: what the probes saw, JSON | when it is not probed |
| `{pNN}:certificate:<app id>` | hash | `version`, `domain`, `fingerprint`, `expiresAt`, `told` | with its domain |
| `{pNN}:findings:<app id>` | hash | `version`, `open`: of the last scan, JSON, 5,000; `red`, `yellow` | with the app |
| `{pNN}:emitted:<event id>` | string | that an event was queued, for one that may be repeated | 1 hour |
| `{pNN}:awaited:<event id>` | string | outcome of an `app.unhealthy`, which decides on its `app.recovered` | 2 days |
| `{pNN}:site:<app id>` | hash | `live`: deploy id; `source`: id of its stored source | with the app |
| `{pNN}:deploy:<id>` | hash | a deploy's record | 90 days |
| `{pNN}:deploy-log:<id>` | string | a deploy's log, 256 KiB | 90 days |
| `{pNN}:deploys:<account>` | zset | deploy ids by when they were queued, ms; the last 1,000 | 90 days |
| `{pNN}:deploys-on:<account>:<day>` | string | deploys of a UTC day | 2 days |
| `{pNN}:builds` | stream | deploys that wait or are built; group `deploys` | each when it is over; 10,000 |
| `{registrations}:<day>` | string | registrations of a UTC day | 2 days |
| `session:<sha256>` | string | whose session of a page: an account's id, or `operator:<hash>` | 12 h |
| `logins:<hash>` | string | failed log-ins of one client address | 60 s |
| `{pNN}:usage:<account>:<hour>` | hash | `requests`, `refused`, `inputTokens`, `outputTokens` of an hour | 48 h |
| `{ops}:minute:<minute>` | hash | `requests`, `code:<CODE>`, `ttft:<ms>` and more: `gateway/counters.py` | 2 h |
| `{ops}:spend:<day>` | zset | accounts by what they spent, nano-euro, and `total` | 2 days |
| `{ops}:processes` | set | ids of the gateway processes | 15 s |
| `{ops}:process:<id>` | hash | `streams` open, `startedAt`, `seenAt` | 15 s |
| `builder` | string | id of the data folder that is built in | 15 s |
| `worker:<group>:<name>` | string | a worker's heartbeat, which holds its name | 15 s |

`{pNN}` is the account's partition and a Redis Cluster hash tag: CRC-16 of the account id modulo 16. One script may
so touch everything that belongs to an account, and everything of an app is under its account's tag.

Changed records are announced on the channel `changes` by the key that changed.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError

from .errors import BackboneUnavailable
from .wire import Wire

PARTITIONS = 16
CHANGES = "changes"
INFERENCE = "inference"
PROVIDER = "provider"
PROBE = "probe"
BUILDER = "builder"
PROCESSES = "{ops}:processes"

LUA = Path(__file__).parent.parent / "lua"
ATTEMPT = 2.0  # seconds that one command may take before Redis counts as unreachable
# redis-py's cluster errors are no RedisError.
FAULTS = (RedisError, RedisClusterException, OSError, asyncio.TimeoutError)


def app_key(name: str) -> str:
    return f"app:{name}"


def alias_key(app_id: str) -> str:
    return f"alias:{app_id}"


def api_key_key(digest: str) -> str:
    return f"key:{digest}"


def session_key(digest: str) -> str:
    return f"session:{digest}"


def logins_key(client: str) -> str:
    return f"logins:{client}"


def tag(account_id: str) -> str:
    return "{p%02d}" % (binascii.crc_hqx(account_id.encode(), 0) % PARTITIONS)


def account_key(account_id: str) -> str:
    return f"{tag(account_id)}:account:{account_id}"


def account_apps_key(account_id: str) -> str:
    return f"{tag(account_id)}:account:{account_id}:apps"


def app_window_key(tag: str, app_id: str) -> str:
    return f"{tag}:window:app:{app_id}"


def user_window_key(tag: str, app_id: str, user: str) -> str:
    """The user's id is the app's affair: Redis sees only its hash."""
    return f"{tag}:window:user:{app_id}:{hashlib.sha256(user.encode()).hexdigest()[:32]}"


def hook_window_key(tag: str, hook_id: str) -> str:
    return f"{tag}:window:hook:{hook_id}"


def reservation_keys(tag: str) -> list[str]:
    """Reservations, their leases."""
    return [f"{tag}:reservations", f"{tag}:leases"]


def spend_prefix(tag: str) -> str:
    """The scripts append account and day, in the same slot."""
    return f"{tag}:spend"


def spend_key(account_id: str, day: str) -> str:
    return f"{tag(account_id)}:spend:{account_id}:{day}"


def usage_key(account_id: str, hour: str) -> str:
    return f"{tag(account_id)}:usage:{account_id}:{hour}"


def minute_key(minute: str) -> str:
    return f"{{ops}}:minute:{minute}"


def spenders_key(day: str) -> str:
    return f"{{ops}}:spend:{day}"


def process_key(process_id: str) -> str:
    return f"{{ops}}:process:{process_id}"


def worker_key(group: str, name: str) -> str:
    return f"worker:{group}:{name}"


def stream_key(tag: str, stream: str) -> str:
    """`events` or `builds` of a partition."""
    return f"{tag}:{stream}"


def outcomes_key(tag: str) -> str:
    return f"{tag}:outcomes"


def event_keys(tag: str, account_id: str) -> list[str]:
    """What a script needs that queues an event: the partition's events, the account's log, the outcomes."""
    return [stream_key(tag, "events"), deliveries_key(account_id), outcomes_key(tag)]


def webhook_key(account_id: str) -> str:
    return f"{tag(account_id)}:webhook:{account_id}"


def deliveries_key(account_id: str) -> str:
    return f"{tag(account_id)}:deliveries:{account_id}"


def hook_key(digest: str) -> str:
    return f"hook:{digest}"


def hooks_key(account_id: str) -> str:
    return f"{tag(account_id)}:hooks:{account_id}"


def hooks_used_key(account_id: str) -> str:
    return f"{tag(account_id)}:hooks-used:{account_id}"


def site_prefix(tag: str) -> str:
    return f"{tag}:site"


def site_key(account_id: str, app_id: str) -> str:
    return f"{site_prefix(tag(account_id))}:{app_id}"


def probes_key(tag: str) -> str:
    return f"{tag}:probes"


def certificates_key(tag: str) -> str:
    return f"{tag}:certificates"


def health_key(tag: str, app_id: str) -> str:
    return f"{tag}:health:{app_id}"


def certificate_key(tag: str, app_id: str) -> str:
    return f"{tag}:certificate:{app_id}"


def findings_key(tag: str, app_id: str) -> str:
    return f"{tag}:findings:{app_id}"


def monitored_keys(tag: str, app_id: str) -> list[str]:
    """All that the monitors know of an app."""
    return [health_key(tag, app_id), certificate_key(tag, app_id), findings_key(tag, app_id)]


def emitted_key(account_id: str, event_id: str) -> str:
    return f"{tag(account_id)}:emitted:{event_id}"


def awaited_prefix(tag: str) -> str:
    return f"{tag}:awaited"


def awaited_key(tag: str, event_id: str) -> str:
    return f"{awaited_prefix(tag)}:{event_id}"


def deploy_key(account_id: str, deploy_id: str) -> str:
    return tagged_deploy_key(tag(account_id), deploy_id)


def tagged_deploy_key(tag: str, deploy_id: str) -> str:
    return f"{tag}:deploy:{deploy_id}"


def deploy_log_key(account_id: str, deploy_id: str) -> str:
    return f"{tag(account_id)}:deploy-log:{deploy_id}"


def deploys_key(account_id: str) -> str:
    return f"{tag(account_id)}:deploys:{account_id}"


def deploys_on_prefix(account_id: str) -> str:
    """The day is appended, in the same slot."""
    return f"{tag(account_id)}:deploys-on:{account_id}"


def partition_tags() -> list[str]:
    return ["{p%02d}" % n for n in range(PARTITIONS)]


class Script:
    """One file of `lua/`, with what it uses of the others in front."""

    def __init__(self, name: str) -> None:
        own = (LUA / f"{name}.lua").read_text()
        used = re.findall(r"^-- uses (\w+)$", own, re.MULTILINE)
        self.source = "\n".join([*((LUA / f"{u}.lua").read_text() for u in used), own])
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: Any, keys: list[str], *args: str | int) -> Any:
        try:
            return await client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self.source, len(keys), *keys, *args)


def end_if_cancelled() -> None:
    """For loops that run as long as their task. redis-py sends with `asyncio.wait_for`, which in Python 3.11 loses a
    cancellation that comes in the moment in which it ends: the loop would go on, and its process would not stop."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@contextmanager
def backbone() -> Iterator[None]:
    """Whatever Redis fails with leaves as one answer."""
    try:
        yield
    except FAULTS as error:
        raise BackboneUnavailable from error


class Store:
    """One client for every command, and connections of their own for what waits (subscriptions, blocking reads)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.cluster = urlsplit(url).scheme.endswith("+cluster")
        # No automatic retries: a command whose answer was lost may have run, and its caller must know.
        options: dict[str, Any] = {
            "decode_responses": True,
            "socket_timeout": ATTEMPT,
            "socket_connect_timeout": ATTEMPT,
            "retry": Retry(NoBackoff(), 0),
        }
        self.client: Any = (
            RedisCluster.from_url(url.replace("+cluster", ""), **options)
            if self.cluster
            else Redis.from_url(url, max_connections=1024, **options)
        )
        # In a cluster the scripts go the client's way, which knows the nodes and follows what moves.
        self.wire = None if self.cluster else Wire(url, ATTEMPT)
        self._change = Script("change")

    async def run(self, script: Script, keys: list[str], *args: str | int) -> Any:
        """The token path's way to run a script. Raises one of FAULTS."""
        if self.wire is None:
            return await script(self.client, keys, *args)
        try:
            return await self.wire.call("EVALSHA", script.sha, len(keys), *keys, *args)
        except ResponseError as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
            return await self.wire.call("EVAL", script.source, len(keys), *keys, *args)

    def blocking_client(self) -> Any:
        """For reads that wait: without the deadline of a command. The caller closes it."""
        options: dict[str, Any] = {
            "decode_responses": True,
            "socket_timeout": None,
            "socket_connect_timeout": ATTEMPT,
            "retry": Retry(NoBackoff(), 0),
        }
        if self.cluster:
            return RedisCluster.from_url(self.url.replace("+cluster", ""), **options)
        return Redis.from_url(self.url, max_connections=64, **options)

    async def keep_looking(self) -> None:
        """Runs as long as the process: ends a connection that does not answer."""
        if self.wire is not None:
            await self.wire.keep_looking()
        else:
            await asyncio.Event().wait()

    async def get(self, key: str) -> str | None:
        with backbone():
            value: str | None = await self.client.get(key)
            return value

    async def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """Of any partitions, in one go. Raises one of FAULTS."""
        async with self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.get(key)
            values: list[str | None] = await pipeline.execute() if keys else []
            return values

    async def info(self) -> list[dict[str, Any]]:
        """What the server says of itself, or each node of a cluster."""
        if not self.cluster:
            return [await self.client.info()]
        return list((await self.client.info(target_nodes=RedisCluster.PRIMARIES)).values())

    async def change(self, key: str, value: str, *, expected: str | None = None) -> bool:
        """Writes ('' removes) and announces a record; with `expected`, only while it holds that."""
        with backbone():
            check = "any" if expected is None else "same"
            return bool(await self._change(self.client, [key], CHANGES, check, expected or "", value))

    @asynccontextmanager
    async def subscription(self) -> AsyncIterator[PubSub]:
        """A subscription to the changes, on a connection of its own; messages reach every node of a cluster."""
        parts = urlsplit(self.url.replace("+cluster", ""))
        if self.cluster:
            await self.client.initialize()
            node = self.client.get_random_node()
            credentials, _, _ = parts.netloc.rpartition("@")
            host = f"[{node.host}]" if ":" in node.host else node.host
            parts = parts._replace(netloc=f"{credentials}{'@' if credentials else ''}{host}:{node.port}", path="")
        client = Redis.from_url(
            urlunsplit(parts), decode_responses=True, socket_timeout=None, socket_connect_timeout=ATTEMPT
        )
        try:
            async with client.pubsub() as subscription:
                await subscription.subscribe(CHANGES)
                yield subscription
        finally:
            await client.aclose()

    async def close(self) -> None:
        if self.wire is not None:
            self.wire.close()
        await self.client.aclose()
