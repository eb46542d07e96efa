"""The Redis keys that may live forever, each with its reason. Every other key must expire.

Reservations and their leases do not expire either, and are not listed: a test must settle all of them.
"""

import re

import redis

KEPT = {
    r"app:": "an app lives until it is deleted",
    r"alias:": "so does its other name",
    r"domain:": "so does its custom domain",
    r"key:": "an API key is valid until it is revoked",
    r"\{p\d\d\}:keys(-used)?:": "the list of these, and when they were used",
    r"\{p\d\d\}:account:": "an account, and the set of its apps, have no end",
    r"inference$": "one record: the switch and the approval survive restarts",
    r"provider$": "one record: what was learnt of the provider",
    r"\{p\d\d\}:webhook:": "a receiver is there until it is cleared",
    r"\{p\d\d\}:events$": "one stream a partition, bounded; an event leaves it with its outcome",
    r"\{p\d\d\}:events:stored$": "one set a partition: a number for each account that has a delivery log",
    r"\{p\d\d\}:builds$": "one stream a partition; a deploy leaves it when it is over",
    r"\{p\d\d\}:site:": "what is live of an app, until the app is deleted",
    r"\{p\d\d\}:serving(:|$)": "what the hosts serve of an app, until the app is deleted",
    r"\{p\d\d\}:environment:": "the variables of an app, until the app is deleted",
    r"\{p\d\d\}:(apps|probes|certificates)$": "one set a partition: every app, until it is deleted",
    r"\{p\d\d\}:accounts$": "one set a partition: every account",
    r"\{p\d\d\}:certificates:ends$": "one set a partition: apps with a custom domain, until they have none",
    r"\{p\d\d\}:unhealthy$": "one set a partition: apps that do not answer, until they do or are deleted",
    r"\{p\d\d\}:builds:ended$": "one hash a partition: how many deploys ended in each state",
    r"\{p\d\d\}:(health|certificate|findings):": "what the monitors know of an app, until it is deleted",
    r"\{p\d\d\}:hooks(-used)?:": "hooks are there until they are revoked",
    r"hook:": "a hook works until it is revoked",
    r"\{p\d\d\}:outcomes$": "one hash a partition: how often each outcome was",
}


def unexplained(client: redis.Redis) -> list[str]:
    names = [key.decode() for key in client.scan_iter(count=1000)]
    return sorted(n for n in names if client.ttl(n) == -1 and not any(re.match(p, n) for p in KEPT))
