"""Keys of the monitors' records of apps.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:probes` | zset | app ids by the time of their next uptime probe, ms | with the app |
| `{pNN}:certificates` | zset | app ids by the time of their next certificate check, ms | with the app |
| `{pNN}:certificates:ends` | zset | app ids by the end of their domain's certificate, ms | with its domain |
| `{pNN}:domain-checks` | zset | app ids by the time of their domain's next check, ms | with the app |
| `{pNN}:health:<app id>` | hash | `version`; `state`: the health, JSON | when the app is no longer probed |
| `{pNN}:certificate:<app id>` | hash | `version`, `domain`, `issuer`, `expiresAt`, `fingerprint`, … | with its domain |
| `{pNN}:domain-check:<app id>` | hash | `version`, `domain`; `missingSince`: without its record, ms | with its domain |
| `{pNN}:unhealthy` | zset | app ids by the time at which they became unhealthy, ms | each when the app answers |
| `{pNN}:findings:<app id>` | hash | `version`; `open`: the last scan, JSON, 5,000; `red`, `yellow` | with the app |
| `{pNN}:health-days:<app id>` | hash | `<day>:down`, ms, and `<day>:outages` of days with probes; 91 | 91 days |
| `{pNN}:crashes:<app id>` | stream | the last 20 crashes, each with its last lines of output | 30 days |
"""

from __future__ import annotations

from gateway.redis.partitions import keys_in_partition, keys_of_partition

probes_key = keys_of_partition("probes")
certificates_key = keys_of_partition("certificates")
certificate_ends_key = keys_of_partition("certificates:ends")
domain_checks_key = keys_of_partition("domain-checks")
unhealthy_key = keys_of_partition("unhealthy")

health_key = keys_in_partition("health")
certificate_key = keys_in_partition("certificate")
domain_check_key = keys_in_partition("domain-check")
findings_key = keys_in_partition("findings")
health_days_key = keys_in_partition("health-days")
crashes_key = keys_in_partition("crashes")


def monitored_keys(tag: str, app_id: str) -> list[str]:
    """Returns the keys of all records that the monitors have of an app."""
    kinds = (health_key, health_days_key, certificate_key, domain_check_key, findings_key, crashes_key)
    return [kind(tag, app_id) for kind in kinds]
