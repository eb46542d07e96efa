"""Reads security scans: our own list, or the JSON that Trivy, Grype and OSV-Scanner print.

Only the fields in use are read, according to the published schema of the format. If a field has another type, the scan
is refused with the path of the field. `SEVERITIES` maps the severities of all scanners. Entries that the scanner itself
marks as not affecting the app are ignored.
"""

import datetime
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from gateway.errors import RequestMalformed
from gateway.ids import now_iso
from gateway.validation import explain, locate

Severity = Literal["critical", "high", "medium", "low", "negligible", "unknown"]
Tier = Literal["red", "yellow"]

SEVERITIES: dict[str, Severity] = {
    "critical": "critical",
    "high": "high",
    "medium": "medium",
    "moderate": "medium",
    "low": "low",
    "negligible": "negligible",
    "informational": "negligible",
    "none": "negligible",
    "unknown": "unknown",
}
RANKS: list[Severity] = ["unknown", "negligible", "low", "medium", "high", "critical"]
MAX_CHARACTERS = {"cve": 100, "component": 300, "fixedIn": 200}  # a scanner's longer values are cut

T = TypeVar("T")


class ReportedFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A vulnerability of a component, whichever scanner reported it."""

    cve: str
    component: str
    severity: Severity
    fixedIn: str | None = None
    exploited: bool = False  # known to be exploited now
    tier: Tier | None = None  # None: decided by `red`
    deadlineAt: str | None = None  # None: set by the settings

    @property
    def red(self) -> bool:
        if self.tier is not None:
            return self.tier == "red"
        return self.fixedIn is not None and (self.severity in ("critical", "high") or self.exploited)


class Scan(msgspec.Struct, frozen=True):
    reported: list[ReportedFinding]
    ignored: int  # entries that do not affect the app, according to the scanner


def read_scan(body: bytes) -> Scan:
    """Raises RequestMalformed, whose message names the field."""
    top = _decode(body, dict[str, msgspec.Raw])
    if "findings" in top:
        return _ours(_decode(body, _Ours))
    if "matches" in top:
        return _grype(_decode(body, _Grype))
    if "SchemaVersion" in top or "Results" in top:
        return _trivy(_decode(body, _Trivy))
    if "results" in top:
        return _osv(_decode(body, _Osv))
    raise RequestMalformed("findings: a list of findings, or a scan as Trivy, Grype or OSV-Scanner print it in JSON.")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fault, field = locate(str(error))
        raise RequestMalformed(f"{field or 'body'}: {explain(fault, kind, field)}.") from None


def _cut(field: str, text: str) -> str:
    return text[: MAX_CHARACTERS[field]]


def _component(name: str, version: str | None) -> str:
    return _cut("component", f"{name}@{version}" if version else name)


def _fixed(versions: list[str]) -> str | None:
    return _cut("fixedIn", ", ".join(dict.fromkeys(v for v in versions if v))) or None


def _severity(text: str | None) -> Severity:
    return SEVERITIES.get((text or "").lower(), "unknown")


# -- our own list --------------------------------------------------------------------------------------------


def _text(longest: int) -> Any:
    return Annotated[str, msgspec.Meta(min_length=1, max_length=longest)]


class _Listed(msgspec.Struct, forbid_unknown_fields=True):
    cve: _text(MAX_CHARACTERS["cve"])  # type: ignore[valid-type]
    component: _text(MAX_CHARACTERS["component"])  # type: ignore[valid-type]
    severity: str
    fixedIn: Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS["fixedIn"])] | None = None
    tier: Tier | None = None
    deadlineAt: Annotated[datetime.datetime, msgspec.Meta(tz=True)] | None = None


class _Ours(msgspec.Struct, forbid_unknown_fields=True):
    findings: list[_Listed]


def _ours(scan: _Ours) -> Scan:
    reported = []
    for number, each in enumerate(scan.findings):
        if each.severity.lower() not in SEVERITIES:
            raise RequestMalformed(f"findings[{number}].severity: choose one of {', '.join(SEVERITIES)}.")
        try:
            deadline = None if each.deadlineAt is None else now_iso(each.deadlineAt.timestamp())
        except OverflowError:
            message = f"findings[{number}].deadlineAt: use a time whose year in UTC is from 1 to 9999."
            raise RequestMalformed(message) from None
        reported.append(
            ReportedFinding(
                cve=each.cve,
                component=each.component,
                severity=_severity(each.severity),
                fixedIn=each.fixedIn or None,
                tier=each.tier,
                deadlineAt=deadline,
            )
        )
    return Scan(reported, 0)


# -- Trivy: `trivy image --format json` ----------------------------------------------------------------------


class _TrivyVulnerability(msgspec.Struct, rename="pascal"):
    pkg_name: str
    vulnerability_id: str = msgspec.field(name="VulnerabilityID")
    installed_version: str | None = None
    fixed_version: str | None = None
    severity: str | None = None
    status: str | None = None


class _TrivyResult(msgspec.Struct, rename="pascal"):
    vulnerabilities: list[_TrivyVulnerability] | None = None


class _Trivy(msgspec.Struct, rename="pascal"):
    schema_version: int = 0
    results: list[_TrivyResult] | None = None


def _trivy(scan: _Trivy) -> Scan:
    found = [each for result in scan.results or [] for each in result.vulnerabilities or []]
    affecting = [each for each in found if each.status != "not_affected"]
    reported = [
        ReportedFinding(
            cve=_cut("cve", each.vulnerability_id),
            component=_component(each.pkg_name, each.installed_version),
            severity=_severity(each.severity),
            fixedIn=_fixed([each.fixed_version or ""]),
        )
        for each in affecting
    ]
    return Scan(reported, len(found) - len(affecting))


# -- Grype: `grype -o json` ----------------------------------------------------------------------------------


class _GrypeFix(msgspec.Struct):
    versions: list[str] | None = None
    state: str = ""


class _GrypeVulnerability(msgspec.Struct, rename="camel"):
    id: str
    severity: str | None = None
    fix: _GrypeFix = msgspec.field(default_factory=_GrypeFix)
    known_exploited: list[msgspec.Raw] | None = None


class _GrypeArtifact(msgspec.Struct):
    name: str
    version: str | None = None


class _GrypeMatch(msgspec.Struct, rename="camel"):
    vulnerability: _GrypeVulnerability
    artifact: _GrypeArtifact
    related_vulnerabilities: list[_GrypeVulnerability] | None = None


class _Grype(msgspec.Struct, rename="camel"):
    matches: list[_GrypeMatch]
    ignored_matches: list[msgspec.Raw] | None = None


def _grype(scan: _Grype) -> Scan:
    reported = []
    for match in scan.matches:
        every = [match.vulnerability, *(match.related_vulnerabilities or [])]
        fix = match.vulnerability.fix
        reported.append(
            ReportedFinding(
                cve=_cve(each.id for each in every),
                component=_component(match.artifact.name, match.artifact.version),
                severity=_severity(match.vulnerability.severity),
                fixedIn=_fixed(fix.versions or []) if fix.state in ("fixed", "") else None,
                exploited=any(each.known_exploited for each in every),
            )
        )
    return Scan(reported, len(scan.ignored_matches or []))


def _cve(ids: Iterator[str]) -> str:
    """Prefers the CVE: scanners use the ids of different catalogs for the same vulnerability."""
    every = list(ids)
    return _cut("cve", next((each for each in every if each.startswith("CVE-")), every[0]))


# -- OSV-Scanner: `osv-scanner --format json` ----------------------------------------------------------------


class _OsvPackage(msgspec.Struct):
    name: str
    version: str | None = None


class _OsvRange(msgspec.Struct):
    type: str = ""
    events: list[dict[str, str]] | None = None


class _OsvAffected(msgspec.Struct):
    package: _OsvPackage | None = None
    ranges: list[_OsvRange] | None = None


class _OsvVulnerability(msgspec.Struct):
    id: str
    aliases: list[str] | None = None
    affected: list[_OsvAffected] | None = None
    database_specific: dict[str, Any] | None = None
    withdrawn: str | None = None


class _OsvGroup(msgspec.Struct):
    """The records of several databases on the same vulnerability."""

    ids: Annotated[list[str], msgspec.Meta(min_length=1)]
    aliases: list[str] | None = None
    max_severity: str | None = None  # a CVSS score


class _OsvFound(msgspec.Struct):
    package: _OsvPackage
    vulnerabilities: list[_OsvVulnerability] | None = None
    groups: list[_OsvGroup] | None = None


class _OsvResult(msgspec.Struct):
    packages: list[_OsvFound] | None = None


class _Osv(msgspec.Struct):
    results: list[_OsvResult] | None


def _osv(scan: _Osv) -> Scan:
    reported, ignored = [], 0
    for found in (found for result in scan.results or [] for found in result.packages or []):
        records = {each.id: each for each in found.vulnerabilities or []}
        groups = found.groups
        if groups is None:  # OSV-Scanner before 1.0
            groups = [_OsvGroup([each.id], each.aliases) for each in records.values()]
        for group in groups:
            members = [records[each] for each in group.ids if each in records]
            if members and all(each.withdrawn for each in members):
                ignored += 1
                continue
            aliases = [*(group.aliases or []), *(alias for each in members for alias in each.aliases or [])]
            reported.append(
                ReportedFinding(
                    cve=_cve(iter([*group.ids, *aliases])),
                    component=_component(found.package.name, found.package.version),
                    severity=_osv_severity(group, members),
                    fixedIn=_fixed([v for each in members for v in _osv_fixes(each, found.package.name)]),
                )
            )
    return Scan(reported, ignored)


def _osv_severity(group: _OsvGroup, members: list[_OsvVulnerability]) -> Severity:
    """Uses the band of the CVSS score or, without a score, the severity that the databases state."""
    try:
        score = float(group.max_severity or "")
    except ValueError:
        words = [_severity(str((each.database_specific or {}).get("severity", ""))) for each in members]
        return max(words, key=RANKS.index, default="unknown")
    bands: list[tuple[float, Severity]] = [(9, "critical"), (7, "high"), (4, "medium"), (0.1, "low")]
    return next((word for least, word in bands if score >= least), "negligible")


def _osv_fixes(record: _OsvVulnerability, package: str) -> Iterator[str]:
    for affected in record.affected or []:
        if affected.package is not None and affected.package.name == package:
            for each in affected.ranges or []:
                if each.type != "GIT":  # a commit is not a version to update to
                    yield from (event["fixed"] for event in each.events or [] if "fixed" in event)
