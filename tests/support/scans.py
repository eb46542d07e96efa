"""Scans as Trivy, Grype and OSV-Scanner print them, written by hand after their published schemas."""

import json
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures" / "scans"


def scan_fixture(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
    return found
