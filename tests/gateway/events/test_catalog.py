"""The catalog has exactly the names, fields and types of the interface, which this test repeats."""

import json
import re
from typing import Any

import msgspec
import pytest

from gateway.events import catalog
from gateway.events.catalog import SAMPLES, encode_data

ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
NAME, HTTPS, TIER = r"(?s).+", r"https://\S+", "red|yellow"
# A field's kind: the pattern of a string, int, or a tuple of choices; None in it allows null.
NAMES = dict.fromkeys(("cve", "component", "severity"), NAME)
FINDING = {**NAMES, "fixedIn": (NAME, None), "tier": TIER, "deadlineAt": (ISO, None)}
PLANS, KINDS = "free|starter|maker|max", "live|preview"
CATALOG = {
    "deploy.succeeded": {"deployId": NAME, "url": HTTPS, "durationMs": int, "kind": KINDS, "plan": PLANS},
    "deploy.failed": {"deployId": NAME, "kind": KINDS, "phase": "build|health|canary", "reason": NAME},
    "app.crashed": {"reason": "exit|oom", "exitCode": (int, None), "at": ISO},
    "app.unhealthy": {"url": NAME, "failures": int, "reason": NAME},
    "app.recovered": {"url": NAME, "downSince": ISO, "downMs": int},
    "domain.expiring": {"domain": NAME, "expiresAt": ISO, "daysLeft": int},
    "security.finding": {"tier": "red", "findings": FINDING},
}
TIME = "2026-07-02T10:00:00.000Z"


def data(event: catalog.Event) -> dict[str, Any]:
    return json.loads(encode_data(event, "app_1", "shop"))


def test_the_data_of_each_sample() -> None:
    assert SAMPLES.keys() == CATALOG.keys() == {kind.type for kind in catalog.Event.__subclasses__()}
    for name, fields in CATALOG.items():
        sample = data(SAMPLES[name])
        assert sample.keys() == {"appId", "appName", "sample", *fields}
        assert (sample["appId"], sample["appName"], sample["sample"]) == ("app_1", "shop", True)
        for field, kind in fields.items():
            assert field == "findings" or is_of(sample[field], kind), field
        for finding in sample.get("findings", []):
            assert finding.keys() == FINDING.keys()
            assert all(is_of(finding[field], kind) for field, kind in FINDING.items())


def is_of(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(is_of(value, choice) for choice in kind)
    if isinstance(kind, str):
        return isinstance(value, str) and re.fullmatch(kind, value) is not None
    return value is None if kind is None else type(value) is kind


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (catalog.AppCrashed, {"reason": "oom", "exitCode": 1, "at": TIME, "other": 1}),
        (catalog.AppCrashed, {"reason": "bored", "exitCode": 1, "at": TIME}),
        (catalog.AppCrashed, {"reason": "oom", "exitCode": 1, "at": "2026-07-02 10:00"}),
        (catalog.DeploySucceeded, {"deployId": "d", "url": "http://x", "durationMs": 1, "kind": "live"}),
        (catalog.SecurityFinding, {"findings": [{"cve": "CVE-1"}]}),
        (catalog.SecurityFinding, {"tier": "yellow", "findings": []}),
    ],
)
def test_a_wrong_field_cannot_be_sent(kind: type[catalog.Event], fields: dict[str, Any]) -> None:
    with pytest.raises((TypeError, msgspec.ValidationError)):
        encode_data(kind(**fields), "app_1", "shop")
