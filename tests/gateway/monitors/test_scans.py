"""Scans are read in four formats: our own, and those of three scanners."""

import json
from typing import Any

import pytest

from gateway.errors import RequestMalformed
from gateway.monitors import scans
from gateway.monitors.scans import ReportedFinding, Severity
from tests.support.scans import scan_fixture


def read(scan: Any) -> scans.Scan:
    return scans.read_scan(json.dumps(scan).encode())


def reported(cve: str, component: str, severity: Severity, fixed: str | None = None, **fields: Any) -> ReportedFinding:
    return ReportedFinding(cve=cve, component=component, severity=severity, fixedIn=fixed, **fields)


def test_trivy() -> None:
    scan = read(scan_fixture("trivy"))
    twice = reported("CVE-2026-1004", "@scope/parser@2.0.0", "medium", "1.9.9, 2.0.1")
    assert scan.reported == [
        reported("CVE-2026-1001", "libssl3@3.0.11-1", "critical", "3.0.13-1"),
        reported("CVE-2026-1002", "zlib1g@1:1.2.13", "high"),
        twice,
        twice,
    ]
    assert scan.ignored == 1
    assert [each.red for each in scan.reported] == [True, False, False, False]


def test_grype() -> None:
    scan = read(scan_fixture("grype"))
    assert scan.reported == [
        reported("CVE-2026-2001", "lodash@4.17.21", "high", "4.17.22"),
        reported("CVE-2026-2002", "curl@8.5.0", "medium", "8.5.1", exploited=True),
        reported("CVE-2026-2003", "busybox@1.36", "critical"),
        reported("CVE-2026-2004", "apt@2.6", "negligible"),
    ]
    assert scan.ignored == 1
    assert [each.red for each in scan.reported] == [True, True, False, False]


def test_osv_scanner() -> None:
    scan = read(scan_fixture("osv"))
    assert scan.reported == [
        reported("CVE-2026-3001", "minimist@1.2.5", "critical", "0.2.4, 1.2.6"),
        reported("GHSA-gggg-hhhh-iiii", "qs@6.5.0", "medium"),
    ]
    assert scan.ignored == 1


def test_the_bands_of_a_score() -> None:
    scan = scan_fixture("osv")
    for severity, scores in {
        "critical": ["10.0", "9.0", "n/a"],  # without a score it is the database's word
        "high": ["8.9", "7"],
        "medium": ["6.9", "4.0"],
        "low": ["3.9", "0.1"],
        "negligible": ["0.0"],
    }.items():
        for score in scores:
            scan["results"][0]["packages"][0]["groups"][0]["max_severity"] = score
            assert read(scan).reported[0].severity == severity


def test_our_own() -> None:
    listed = {"cve": "CVE-1", "component": "a", "severity": "HIGH", "fixedIn": "2"}
    full = {**listed, "cve": "CVE-2", "tier": "yellow", "deadlineAt": "2026-07-09T12:00:00+02:00"}
    bare = {"cve": "CVE-3", "component": "b", "severity": "Moderate", "tier": "red", "fixedIn": None}
    bare["deadlineAt"] = "0001-01-01T00:00:00Z"  # as Go writes a time that is not set
    without_fix = {"cve": "CVE-4", "component": "b", "severity": "high", "fixedIn": ""}  # as Trivy writes it
    scan = read({"findings": [listed, full, bare, without_fix]})
    assert scan.reported == [
        reported("CVE-1", "a", "high", "2"),
        reported("CVE-2", "a", "high", "2", tier="yellow", deadlineAt="2026-07-09T10:00:00.000Z"),
        reported("CVE-3", "b", "medium", tier="red", deadlineAt="0001-01-01T00:00:00.000Z"),
        reported("CVE-4", "b", "high"),
    ]
    assert [each.red for each in scan.reported] == [True, False, True, False]


def test_nothing_found() -> None:
    trivy = [{"SchemaVersion": 2}, {"Results": []}, {"Results": None}]
    for empty in ({"findings": []}, {"matches": []}, {"results": []}, {"results": None}, *trivy):
        assert read(empty) == scans.Scan([], 0)


LISTED = {"cve": "CVE-1", "component": "a", "severity": "high", "fixedIn": None}


@pytest.mark.parametrize(
    ("scan", "named"),
    [
        ({"findings": [{**LISTED, "cve": ""}]}, "findings[0].cve"),
        ({"findings": [LISTED, {**LISTED, "component": 7}]}, "findings[1].component"),
        ({"findings": [{**LISTED, "severity": "hgih"}]}, "findings[0].severity"),
        ({"findings": [{**LISTED, "deadlineAt": "9999-12-31T23:59:59.9999Z"}]}, "findings[0].deadlineAt"),
        ({"findings": [{**LISTED, "note": "x"}]}, "findings[0]"),
        ({"findings": [{**LISTED, "component": "x" * 301}]}, "findings[0].component"),
        ({"matches": [{"vulnerability": {"id": 7}, "artifact": {"name": "a"}}]}, "matches[0].vulnerability.id"),
        ({"SchemaVersion": 2, "Results": [{"Vulnerabilities": [{"PkgName": "a"}]}]}, "Results[0].Vulnerabilities[0]"),
        ({"results": [{"packages": [{"package": {}}]}]}, "results[0].packages[0].package"),
        ({"results": [{"packages": [{"package": {"name": "a"}, "groups": [{"ids": []}]}]}]}, "groups[0].ids"),
        ({}, "findings"),
        ([], "body"),
    ],
)
def test_what_is_malformed_is_named(scan: Any, named: str) -> None:
    with pytest.raises(RequestMalformed) as refusal:
        read(scan)
    assert f"{named}:" in str(refusal.value)


def test_what_is_no_json() -> None:
    for body in (b"", b'{"findings": [}', b'{"findings": ["\xff"]}'):
        with pytest.raises(RequestMalformed):
            scans.read_scan(body)
