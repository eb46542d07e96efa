"""Keys of deploys, their hooks and builds, and the releases that hosts serve.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `hook:<sha256>` | string | a deploy hook, JSON | when it is revoked |
| `{pNN}:hooks:<account>` | hash | hook id → the hook's hash and record, JSON | each when revoked; 100 |
| `{pNN}:hooks-used:<account>` | hash | hook id → time of its last use, ms | each when revoked |
| `{pNN}:window:hook:<id>` | rate window | the hook's triggers | 60 s |
| `{pNN}:site:<app id>` | hash | `live`, `queued:<address>`, `preview:<address>`: deploys; `source` | with the app |
| `{pNN}:certified-names:<account>` | zset | names that may have certificates, by the first request, s | 90 days |
| `{pNN}:environment:<account>:<app id>` | string | the variables, JSON; values are encrypted | with the app; 64 KiB |
| `{pNN}:deploy:<id>` | hash | a deploy's record | 90 days |
| `{pNN}:deploy-log:<id>` | string | the log of a deploy in progress, at most 256 KiB | at the deploy's end, or 2 days |
| `{pNN}:deploys:<account>` | zset | ids of the last 1,000 deploys by the time they were queued, ms | 90 days |
| `{pNN}:deploys-on:<account>:<day>` | string | number of deploys on a UTC day | 2 days |
| `{pNN}:builds` | stream | deploys waiting or in progress; group `deploys` | each at the deploy's end; 10,000 |
| `{pNN}:builds:failed` | zset | `<account> <deploy>` of failed deploys by time, ms; the last 100 of a day | 1 day |
| `{pNN}:builds:ended` | hash | final state → number of deploys | never: three fields |
| `{builds}:waiting` | hash | deploys that wait for a builder, JSON | 150 s |
| `{builds}:running` | hash | deploys in progress and their builders, JSON | 150 s |
| `{builds}:order` | zset | accounts by the number of their last build | 150 s |
| `{pNN}:serving:<app id>` | hash | with shared storage: address → the release to serve, JSON | with the app |
| `{pNN}:serving` | zset | app ids by the version of their last change in `serving` | with the app |
| `{pNN}:answers:<deploy id>` | hash | host → its progress with the deploy, JSON | 1 hour |
| `{sites}:hosts` | zset | hosts that serve apps, by the time of their last heartbeat, ms | 30 s |
| `{sites}:leases` | hash | host → its lease, which all its claims depend on, JSON | 1 hour |
| `{pNN}:claims` | hash | app id → the host that runs it and the copy of its data, JSON; `version` | each with the app |
| `builder` | string | id of the data folder that holds the apps | 7 days after its last builder |
| `build-positions` | string | the position and reason of each queued deploy, by deploy id, JSON | 15 s |
"""

from __future__ import annotations

from gateway.redis.partitions import (
    keys_in_account,
    keys_in_partition,
    keys_of_account,
    keys_of_all,
    keys_of_partition,
    partition_tag,
)

BUILDER_KEY = "builder"
BUILD_POSITIONS_KEY = "build-positions"
HOSTS_KEY = "{sites}:hosts"
LEASES_KEY = "{sites}:leases"

hook_key = keys_of_all("hook")

hooks_key = keys_of_account("hooks")
hooks_used_key = keys_of_account("hooks-used")
deploys_key = keys_of_account("deploys")
certified_names_key = keys_of_account("certified-names")
deploys_on_prefix = keys_of_account("deploys-on")  # a script appends the day, in the same slot

site_key = keys_in_account("site")
deploy_key = keys_in_account("deploy")
deploy_log_key = keys_in_account("deploy-log")
serving_key = keys_in_account("serving")
answers_key = keys_in_account("answers")

site_prefix = keys_of_partition("site")
deploy_prefix = keys_of_partition("deploy")
served_apps_key = keys_of_partition("serving")
claims_key = keys_of_partition("claims")
failed_deploys_key = keys_of_partition("builds:failed")
ended_deploys_key = keys_of_partition("builds:ended")  # `queue_deploy.lua` appends it to the key of the builds

tagged_deploy_key = keys_in_partition("deploy")
tagged_serving_key = keys_in_partition("serving")
hook_window_key = keys_in_partition("window:hook")


def environment_key(account_id: str, app_id: str) -> str:
    """Includes the account, because an app of the same id may later belong to another one."""
    return f"{partition_tag(account_id)}:environment:{account_id}:{app_id}"


def deploys_on_key(account_id: str, day: str) -> str:
    return f"{deploys_on_prefix(account_id)}:{day}"


def build_queue_keys() -> list[str]:
    """Returns the keys of the deploys that wait, those that run, and the order of accounts."""
    return ["{builds}:waiting", "{builds}:running", "{builds}:order"]
