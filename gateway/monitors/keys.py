"""Keys of the monitors' records of apps.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:probes` | zset | app ids by the time of their next uptime probe, ms | with the app |
| `{pNN}:certificates` | zset | app ids by the time of their next certificate check, ms | with the app |
| `{pNN}:certificates:ends` | zset | app ids by the end of their domain's certificate, ms | with its domain |
| `{pNN}:health:<app id>` | hash | `version`; `state`: the health, JSON | when the app is no longer probed |
| `{pNN}:certificate:<app id>` | hash | `version`, `domain`, `issuer`, `expiresAt`, `fingerprint`, … | with its domain |
| `{pNN}:unhealthy` | zset | app ids by the time at which they became unhealthy, ms | each when the app answers |
| `{pNN}:findings:<app id>` | hash | `version`; `open`: the last scan, JSON, 5,000; `red`, `yellow` | with the app |
| `{pNN}:health-days:<app id>` | hash | `<day>:down`, ms, and `<day>:outages` of days with probes; 91 | 91 days |
| `{pNN}:crashes:<app id>` | stream | the last 20 crashes, each with its last lines of output | 30 days |
"""

from __future__ import annotations


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


def health_days_key(tag: str, app_id: str) -> str:
    return f"{tag}:health-days:{app_id}"


def crashes_key(tag: str, app_id: str) -> str:
    return f"{tag}:crashes:{app_id}"


def certificate_ends_key(tag: str) -> str:
    return f"{tag}:certificates:ends"


def unhealthy_key(tag: str) -> str:
    return f"{tag}:unhealthy"


def monitored_keys(tag: str, app_id: str) -> list[str]:
    """Returns the keys of all records that the monitors have of an app."""
    kinds = (health_key, health_days_key, certificate_key, findings_key, crashes_key)
    return [kind(tag, app_id) for kind in kinds]
