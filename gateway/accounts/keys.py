"""Keys of accounts, apps, API keys and sessions.

When a record changes, the name of its key is published on the channel `changes`.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `app:<name>` | string | an app's record, JSON | when the app is deleted |
| `alias:<id>` | string | name of the app with this id, if the two differ | when the app is deleted |
| `domain:<name>` | string | id of the app with this custom domain, and time of its claim, s | with the app |
| `former-name:<name>` | string | id of the account whose live app had this name, until it was deleted | 30 days |
| `key:<sha256>` | string | `<account> <key id>`, to which a presented API key belongs | when the key is revoked |
| `{pNN}:account:<id>` | string | an account's record, JSON | with the account |
| `{pNN}:account:<id>:apps` | set | names of the account's apps | with the account |
| `{pNN}:app-lock:<account>` | string | held while one app of the account is created or deleted | 15 s |
| `{pNN}:app-changes:<account>` | string | number of attempts to create, change or delete an app | 60 s |
| `{pNN}:token-checks:<account>` | string | number of tokens that the account holder checked | 60 s |
| `{pNN}:deleted-apps:<account>` | list | ids of its deleted apps, whose windows its next new apps inherit | 60 s |
| `{pNN}:domain-lookups:<app id>` | string | number of times that its custom domain was to be verified | 60 s |
| `{pNN}:accounts` | zset | ids of the partition's accounts, which sort by time | each with the account |
| `{pNN}:apps` | zset | ids of the partition's apps | each with the app |
| `{pNN}:suspended` | hash | suspended account, or `app:` and app id → time, ms; `version` | each when resumed |
| `{pNN}:keys:<account>` | hash | key id → the record of a valid API key, JSON | each when revoked; 26 |
| `{pNN}:keys-used:<account>` | hash | key id → time of its last use, ms | each when revoked |
| `{registrations}:<day>` | string | number of registrations on a UTC day | 2 days |
| `session:<sha256>` | string | subject of a page's session: `<account> <key id>`, or `operator:<hash>` | 12 h |
| `sessions:<sha256>` | list | hashes of the newest 20 sessions with one subject, by its hash | 12 h |
| `logins:<hash>` | string | number of failed log-ins from one client address | 60 s |
| `registered:<hash>` | string | number of registrations from one client address | 1 day |
"""

from __future__ import annotations

from gateway.redis.partitions import keys_in_account, keys_of_account, keys_of_all, keys_of_partition

REGISTRATIONS_KEY = "{registrations}"  # the day is appended, in the same slot
REGISTRATIONS_MOVING_KEY = "{registrations}:moving"  # never exists; `count_registration.lua` explains why
APP = "app"
SESSIONS_PREFIX = "sessions:"
REGISTERED_PREFIX = "registered:"

app_key = keys_of_all(APP)
alias_key = keys_of_all("alias")
domain_key = keys_of_all("domain")
former_name_key = keys_of_all("former-name")
api_key_key = keys_of_all("key")
session_key = keys_of_all("session")
logins_key = keys_of_all("logins")

account_key = keys_of_account("account")
app_lock_key = keys_of_account("app-lock")
app_changes_key = keys_of_account("app-changes")
token_checks_key = keys_of_account("token-checks")
deleted_apps_key = keys_of_account("deleted-apps")
api_keys_key = keys_of_account("keys")
api_keys_used_key = keys_of_account("keys-used")

domain_lookups_key = keys_in_account("domain-lookups")

accounts_key = keys_of_partition("accounts")
apps_key = keys_of_partition("apps")
suspended_key = keys_of_partition("suspended")


def account_apps_key(account_id: str) -> str:
    return f"{account_key(account_id)}:apps"
