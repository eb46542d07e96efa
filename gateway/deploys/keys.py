"""Keys of deploys, their hooks and builds, and the releases that hosts serve.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `hook:<sha256>` | string | a deploy hook, JSON | when it is revoked |
| `{pNN}:hooks:<account>` | hash | hook id → the hook's hash and record, JSON | each when revoked; 100 |
| `{pNN}:hooks-used:<account>` | hash | hook id → time of its last use, ms | each when revoked |
| `{pNN}:window:hook:<id>` | rate window | the hook's triggers | 60 s |
| `{pNN}:site:<app id>` | hash | `live`, `queued:<address>`: deploys; `source`: the stored source | with the app |
| `{pNN}:environment:<account>:<app id>` | string | the variables, JSON; values are encrypted | with the app; 64 KiB |
| `{pNN}:deploy:<id>` | hash | a deploy's record | 90 days |
| `{pNN}:deploy-log:<id>` | string | the log of a deploy in progress, at most 256 KiB | at the deploy's end, or 2 days |
| `{pNN}:deploys:<account>` | zset | ids of the last 1,000 deploys by the time they were queued, ms | 90 days |
| `{pNN}:deploys-on:<account>:<day>` | string | number of deploys on a UTC day | 2 days |
| `{pNN}:builds` | stream | deploys waiting or in progress; group `deploys` | each at the deploy's end; 10,000 |
| `{pNN}:builds:failed` | zset | `<account> <deploy>` of failed deploys by time, ms; the last 100 of a day | 1 day |
| `{pNN}:builds:ended` | hash | final state → number of deploys | never: three fields |
| `{builds}:waiting` | hash | with shared storage: deploys that wait for a builder, JSON | 150 s |
| `{builds}:running` | hash | deploys in progress and their builders, JSON | 150 s |
| `{builds}:order` | zset | accounts by the number of their last build | 150 s |
| `{pNN}:serving:<app id>` | hash | with shared storage: address → the release to serve, JSON | with the app |
| `{pNN}:serving` | zset | app ids by the version of their last change in `serving` | with the app |
| `{pNN}:answers:<deploy id>` | hash | host → its progress with the deploy, JSON | 1 hour |
| `{sites}:hosts` | zset | hosts that serve apps, by the time of their last heartbeat, ms | 30 s |
| `builder` | string | id of the data folder that holds the apps | 7 days after its last builder |
| `build-positions` | string | the position and reason of each queued deploy, by deploy id, JSON | 15 s |
"""

from __future__ import annotations

from gateway.redis.partitions import partition_tag, stream_key

BUILDER_KEY = "builder"
BUILD_POSITIONS_KEY = "build-positions"
HOSTS_KEY = "{sites}:hosts"


def hook_window_key(tag: str, hook_id: str) -> str:
    return f"{tag}:window:hook:{hook_id}"


def failed_deploys_key(tag: str) -> str:
    return f"{stream_key(tag, 'builds')}:failed"


def ended_deploys_key(tag: str) -> str:
    """`queue_deploy.lua` appends it to the key of the builds."""
    return f"{stream_key(tag, 'builds')}:ended"


def hook_key(digest: str) -> str:
    return f"hook:{digest}"


def hooks_key(account_id: str) -> str:
    return f"{partition_tag(account_id)}:hooks:{account_id}"


def hooks_used_key(account_id: str) -> str:
    return f"{partition_tag(account_id)}:hooks-used:{account_id}"


def site_prefix(tag: str) -> str:
    return f"{tag}:site"


def site_key(account_id: str, app_id: str) -> str:
    return f"{site_prefix(partition_tag(account_id))}:{app_id}"


def environment_key(account_id: str, app_id: str) -> str:
    """Includes the account, because an app of the same id may later belong to another one."""
    return f"{partition_tag(account_id)}:environment:{account_id}:{app_id}"


def deploy_key(account_id: str, deploy_id: str) -> str:
    return tagged_deploy_key(partition_tag(account_id), deploy_id)


def tagged_deploy_key(tag: str, deploy_id: str) -> str:
    return f"{deploy_prefix(tag)}:{deploy_id}"


def deploy_prefix(tag: str) -> str:
    return f"{tag}:deploy"


def serving_key(account_id: str, app_id: str) -> str:
    return f"{partition_tag(account_id)}:serving:{app_id}"


def tagged_serving_key(tag: str, app_id: str) -> str:
    return f"{tag}:serving:{app_id}"


def served_apps_key(tag: str) -> str:
    return f"{tag}:serving"


def answers_key(account_id: str, deploy_id: str) -> str:
    return f"{partition_tag(account_id)}:answers:{deploy_id}"


def build_queue_keys() -> list[str]:
    """Returns the keys of the deploys that wait, those that run, and the order of accounts."""
    return ["{builds}:waiting", "{builds}:running", "{builds}:order"]


def deploy_log_key(account_id: str, deploy_id: str) -> str:
    return f"{partition_tag(account_id)}:deploy-log:{deploy_id}"


def deploys_key(account_id: str) -> str:
    return f"{partition_tag(account_id)}:deploys:{account_id}"


def deploys_on_key(account_id: str, day: str) -> str:
    return f"{deploys_on_prefix(account_id)}:{day}"


def deploys_on_prefix(account_id: str) -> str:
    """Returns the prefix of the counters, to which a script appends the day, in the same slot."""
    return f"{partition_tag(account_id)}:deploys-on:{account_id}"
