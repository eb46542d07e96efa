"""Checks Redis: whether it takes writes, its settings, its clock, and the layout of its data."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.errors import BackboneUnavailable
from gateway.keys import LAYOUT_KEY
from gateway.operations.layout import LAYOUT
from gateway.operations.redis_health import MAX_SKEW_SECONDS, RedisHealth
from gateway.redis.client import Store
from gateway.redis.errors import advise, describe
from gateway.settings import Settings
from workers.doctor.row import Row, State, judge_use

OLDEST_REDIS = 7
WARN_SKEW_SECONDS = 2.0
COMMAND_SECONDS = 5.0  # longer than elsewhere, because the checks beside it keep this process busy


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    store = Store(
        settings.redis_url, ca_file=settings.ca_file, replicas=settings.redis_wait, command_seconds=COMMAND_SECONDS
    )
    try:
        yield store
    finally:
        await store.close()


async def check_redis(settings: Settings) -> AsyncIterator[Row]:
    async with open_store(settings) as store:
        try:
            servers, policies = await store.info(), await store.read_option("appendfsync")
            skew, layout = await store.read_skew(), await store.get(LAYOUT_KEY) or str(LAYOUT)
        except BackboneUnavailable as error:
            yield _describe_fault(error)
            return
        try:
            await RedisHealth(store).check()
        except BackboneUnavailable as error:
            yield _describe_fault(error)
        else:
            yield Row("redis", "ok", "takes writes")
        for info, policy in zip(servers, policies, strict=True):
            for row in _judge_server(info, policy):
                yield row
        yield _judge_skew(skew)
        yield _judge_layout(layout)


def _describe_fault(error: BackboneUnavailable) -> Row:
    return Row("redis", "fail", describe(error.__cause__ or error), advise(error.__cause__ or error))


def _judge_server(info: dict[str, Any], appendfsync: str) -> Iterator[Row]:
    version = str(info.get("valkey_version") or info.get("redis_version", ""))
    name = "Valkey" if "valkey_version" in info else "Redis"
    if int(version.partition(".")[0] or 0) >= OLDEST_REDIS:
        yield Row("redis version", "ok", f"{name} {version}")
    else:
        yield Row("redis version", "fail", f"{name} {version}", "use Redis 7, Valkey 8, or newer")
    if not info.get("aof_enabled"):
        action = "set appendonly yes; otherwise a restart loses accounts and money"
        yield Row("redis persistence", "fail", "the append-only file is off", action)
    elif appendfsync == "no":
        action = "set appendfsync everysec or always; otherwise a power cut loses the last half minute of money"
        yield Row("redis persistence", "fail", "appendfsync no: Redis does not wait for its disk", action)
    else:
        detail = f"the append-only file is on{appendfsync and f', with appendfsync {appendfsync}'}"
        yield Row("redis persistence", "ok", detail)
    policy = str(info.get("maxmemory_policy", ""))
    if policy == "noeviction":
        yield Row("redis eviction", "ok", policy)
    else:
        yield Row("redis eviction", "fail", policy, "set maxmemory-policy noeviction; eviction loses apps or money")
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        yield Row("redis memory", "warn", "no limit", "set maxmemory below the memory of its machine")
    else:
        yield Row("redis memory", *judge_use(used, limit, "raise maxmemory of Redis"))


def _judge_skew(skew: float) -> Row:
    detail = f"{abs(skew):.1f} seconds {'ahead of' if skew > 0 else 'behind'} Redis's"
    if abs(skew) > WARN_SKEW_SECONDS:
        state: State = "fail" if abs(skew) > MAX_SKEW_SECONDS else "warn"
        return Row("clock", state, detail, "synchronize the clocks of both machines, for example with chrony")
    return Row("clock", "ok", detail)


def _judge_layout(text: str) -> Row:
    if text.isdecimal() and int(text) <= LAYOUT:
        return Row("layout", "ok", f"the data are of layout {text}, and this version knows {LAYOUT}")
    action = "run the restore again that was interrupted, or the newer version that wrote the data"
    return Row("layout", "fail", f"the data are of layout {text!r}, and this version knows {LAYOUT}", action)
