"""Computes what an installation needs for a load, from measured constants.

    .venv/bin/python bench/capacity.py                       # prints the tables of docs/scaling.md
    .venv/bin/python bench/capacity.py 5000 800 60000 20     # streams, requests, tokens and events per second

Each need is the load times its cost, divided by the share of a core to use. The second table lists the limits that more
gateways do not raise.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

# -- measured: bench/README.md, and bench/ramp.py for Redis --------------------------------------------------

REQUEST_US = 159  # gateway CPU per request with a known user
NEW_USER_US = 144  # extra for the first request of a token: its signature is verified
TOKEN_US = 20.5  # per token that arrives alone; 10 when many arrive together
STREAM_KIB = 14.5  # memory per open stream
STREAM_US = 3.5  # gateway CPU per second of an open stream, even when idle
PROCESS_MIB = 100  # memory of a gateway process with 1,000 apps
REDIS_US = 63  # CPU of Redis per request, without an append-only file
RUNNING_BYTES = 290  # in Redis, per running request
SETTLED_BYTES = 103  # in Redis, for the tombstone of each request settled in the last SETTLED_SECONDS
SETTLED_SECONDS = 1_320  # the rest of a reservation's life, plus 11 minutes
USER_BYTES = 300  # in Redis, per user active in the last minute
DELIVERIES = 4904  # per CPU second of a webhook worker
DESCRIPTORS = 32_512  # client connections per process
PARTITIONS = 16  # the most Redis nodes that can share the accounts
PROVIDER_RATE = 600  # requests per minute and model: the provider's usual quota

# -- assumed -------------------------------------------------------------------------------------------------

NEW_USERS = 0.5  # share of requests with a token new to their process: users return to any process
REQUESTS_PER_USER = 2  # in a minute in which the user is active
USED = 0.6  # average share of a gateway's or worker's core: the rest is for peaks and the loss of a host
REDIS_USED = 0.4  # average share of a shard's core: accounts spread unevenly
MIB_PER_CORE = 4096  # memory that comes with a rented core
CORE_EUROS = 20.0  # per month, with that memory. An assumption: use your own price
COPIES = 2  # of each shard: a primary and a replica
OUTPUT_NANO_EUROS = 600  # per token of the default model


@dataclass(frozen=True)
class Load:
    streams: int  # open at the same time
    requests: int  # per second
    tokens: int  # per second
    events: int  # per second


LOADS = [
    Load(100, 20, 3_000, 1),
    Load(1_000, 200, 30_000, 10),
    Load(5_000, 1_000, 150_000, 50),
    Load(20_000, 4_000, 600_000, 200),
    Load(50_000, 10_000, 1_500_000, 500),
    Load(100_000, 20_000, 3_000_000, 1_000),
]


def gateway_cores(load: Load) -> float:
    """Returns the number of cores that the load keeps busy."""
    requests = load.requests * (REQUEST_US + NEW_USERS * NEW_USER_US)
    return (requests + load.tokens * TOKEN_US + load.streams * STREAM_US) / 1e6


def needs(load: Load) -> list[int | str]:
    """Returns the cells of the load's row. The provider's price is for output alone."""
    gateways = max(2, math.ceil(gateway_cores(load) / USED), math.ceil(load.streams / DESCRIPTORS))
    shards = max(1, math.ceil(load.requests * REDIS_US / 1e6 / REDIS_USED))
    workers = max(2, math.ceil(load.events / DELIVERIES / USED))
    gateway_mib = math.ceil(gateways * PROCESS_MIB + load.streams * STREAM_KIB / 1024)
    users = load.requests * 60 / REQUESTS_PER_USER
    settled = load.requests * SETTLED_SECONDS
    # Of requests and active users, without accounts, apps and deliveries.
    redis_mib = math.ceil((load.streams * RUNNING_BYTES + users * USER_BYTES + settled * SETTLED_BYTES) / 1_048_576)
    euros = (max(gateways, gateway_mib / MIB_PER_CORE) + shards * COPIES + workers) * CORE_EUROS
    provider_euros = load.tokens * OUTPUT_NANO_EUROS * 3600 / 1e9
    cells: list[int | str] = [load.streams, load.requests, load.tokens, load.events, gateways, f"{gateway_mib:,} MiB"]
    return [*cells, shards, f"{redis_mib:,} MiB", workers, round(euros), round(provider_euros)]


def table(loads: list[Load]) -> str:
    lines = [
        "| open streams | requests/s | tokens/s | events/s | gateway processes | their memory | Redis shards"
        " | memory in Redis | webhook workers | EUR per month | provider, EUR per hour |",
        "| --- " * 11 + "|",
    ]
    for load in loads:
        cells = [f"{cell:,}" if isinstance(cell, int) else cell for cell in needs(load)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def walls() -> str:
    """Returns the table of limits, the nearest first."""
    largest = LOADS[-1]
    per_account = 1e6 * REDIS_USED / REDIS_US
    rows = [
        (
            f"the provider's quota of {PROVIDER_RATE} requests per minute and model",
            f"{PROVIDER_RATE // 60} requests/s",
            "ask the provider for more",
        ),
        ("the provider's quota of 100 concurrent requests", "100 open streams", "ask the provider for more"),
        ("one gateway process", f"{USED * 1e6 / TOKEN_US:,.0f} tokens/s", "more processes"),
        ("one Redis server", f"{per_account:,.0f} requests/s", "Redis Cluster"),
        ("one account: its cap is kept on one shard", f"{per_account:,.0f} requests/s for that account", "none"),
        ("sixteen shards", f"{PARTITIONS * per_account:,.0f} requests/s", "none: accounts have sixteen partitions"),
    ]
    lines = ["| limit | reached at | remedy |", "| --- | --- | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    share = largest.tokens * TOKEN_US / 1e6 / gateway_cores(largest)
    lines += ["", f"Of the gateways' CPU time, {100 * share:.0f} % goes to tokens, the rest to requests."]
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) == 5:
        print(table([Load(*map(int, sys.argv[1:]))]))
    else:
        print(table(LOADS), walls(), sep="\n\n")


if __name__ == "__main__":
    main()
