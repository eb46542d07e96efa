"""Keys of the audit trail and of workers.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{ops}:workers` | set | `<group>:<name>` of the workers that read no stream, including some that have ended | 1 h |
| `{ops}:audit:<trail>` | stream | changes by operators, or reports of machines: the last 10,000 of each | 400 days |
| `worker:<group>:<name>` | string | a worker's heartbeat, which reserves its name | 15 s |
"""

from __future__ import annotations

WORKERS_KEY = "{ops}:workers"
HEARTBEAT_SECONDS = 15  # lifetime of a worker's heartbeat


def audit_key(trail: str) -> str:
    return f"{{ops}}:audit:{trail}"


def worker_key(group: str, name: str) -> str:
    return f"worker:{group}:{name}"
