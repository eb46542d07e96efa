"""What the monitors observe of an app's custom domains: certificates, and since when TXT records are missing.

The record of certificates also has `expiresAt`, the end of the one that ends first. Records of the version before are
about one domain, and are read as well.
"""

from collections.abc import Mapping

import msgspec


class Certificate(msgspec.Struct, frozen=True):
    """The certificate of a domain at its last inspection."""

    fingerprint: str  # SHA-256, hexadecimal
    expires: int  # ms
    issuer: str = ""
    notified: tuple[str, ...] = ()  # the fingerprints of which the account was notified


def read_certificates(record: Mapping[str, str]) -> dict[str, Certificate]:
    """Returns the certificates by domain."""
    if "certificates" in record:
        return msgspec.json.decode(record["certificates"], type=dict[str, Certificate])
    if not record.get("domain"):
        return {}
    notified = msgspec.json.decode(record["notified"], type=tuple[str, ...])
    certificate = Certificate(record["fingerprint"], int(record["expiresAt"]), record.get("issuer", ""), notified)
    return {record["domain"]: certificate}


def write_certificates(certificates: Mapping[str, Certificate]) -> dict[str, str]:
    first = min(certificate.expires for certificate in certificates.values())
    return {"certificates": msgspec.json.encode(certificates).decode(), "expiresAt": str(first)}


def read_missing(record: Mapping[str, str]) -> dict[str, int]:
    """Returns since when the TXT records of domains are missing, in ms, by domain."""
    if "missing" in record:
        return msgspec.json.decode(record["missing"], type=dict[str, int])
    return {record["domain"]: int(record["missingSince"])} if record.get("missingSince") else {}


def write_missing(missing: Mapping[str, int]) -> dict[str, str]:
    return {"missing": msgspec.json.encode(missing).decode()}
