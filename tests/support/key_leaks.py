"""Finds leaked Redis keys: those without an expiry that are not in the list below.

Reservations and their leases do not expire either, and are not listed, because a test must settle all of them.
"""

import re

import redis

KEPT = {
    r"app:": "an app lives until it is deleted",
    r"alias:": "the other name of an app lives as long as the app",
    r"domain:": "the custom domain of an app lives as long as the app",
    r"key:": "an API key is valid until it is revoked",
    r"\{p\d\d\}:keys(-used)?:": "the list of API keys, and the times of their use",
    r"\{p\d\d\}:account:": "an account and the set of its apps are never deleted",
    r"\{p\d\d\}:members:": "the members of an account",
    r"memberships:": "the accounts of a member",
    r"layout$": "one number",
    r"inference$": "one record: the switch and the approval survive restarts",
    r"provider(:[a-z0-9-]+)?$": "one record for each provider: its health",
    r"\{p\d\d\}:webhook:": "a receiver lives until it is cleared",
    r"\{p\d\d\}:events$": "one stream per partition, with a limit; an event leaves it with its outcome",
    r"\{p\d\d\}:events:stored$": "one set per partition: a number for each account with a delivery log",
    r"\{p\d\d\}:builds$": "one stream per partition; a deploy leaves it when it has finished",
    r"\{p\d\d\}:site:": "the live deploy of an app, until the app is deleted",
    r"\{p\d\d\}:serving(:|$)": "the deploys of an app on its hosts, until the app is deleted",
    r"\{p\d\d\}:data-snapshots:": "the snapshots of an app's data, until the app is deleted",
    r"\{p\d\d\}:data-deleted$": "one set per partition: each deletion leaves it after a week",
    r"\{p\d\d\}:environment:": "the variables of an app, until the app is deleted",
    r"\{p\d\d\}:(apps|probes|certificates|domain-checks)$": "one set per partition: every app, until it is deleted",
    r"\{p\d\d\}:accounts$": "one set per partition: every account",
    r"\{p\d\d\}:deletions$": "one set per partition: accounts that are being deleted",
    r"\{p\d\d\}:leaving:": "the ids and names of an account's apps, until the account is deleted",
    r"\{p\d\d\}:suspended$": "one hash per partition: suspended apps and accounts, until they are resumed",
    r"\{p\d\d\}:certificates:ends$": "one set per partition: apps with a custom domain, until they have none",
    r"\{p\d\d\}:unhealthy$": "one set per partition: apps that do not respond, until they do or are deleted",
    r"\{p\d\d\}:builds:ended$": "one hash per partition: the number of deploys that ended in each state",
    r"\{p\d\d\}:(health|certificate|domain-check|findings):": "the monitors' records of an app, until it is deleted",
    r"\{p\d\d\}:hooks(-used)?:": "hooks live until they are revoked",
    r"hook:": "a hook lives until it is revoked",
    r"\{p\d\d\}:notices:": "who gets an account's notices, until they end them",
    r"\{p\d\d\}:mails$": "one stream per partition, with a limit; a notice leaves it with its outcome",
    r"\{p\d\d\}:mails:outcomes$": "one hash per partition: the number of notices with each outcome",
    r"\{p\d\d\}:outcomes$": "one hash per partition: the number of deliveries with each outcome",
}


def assert_no_leak(client: redis.Redis) -> None:
    names = [key.decode() for key in client.scan_iter(count=1000)]
    leaked = sorted(n for n in names if client.ttl(n) == -1 and not any(re.match(p, n) for p in KEPT))
    assert not leaked, f"keys without expiry or reason: {leaked}"
