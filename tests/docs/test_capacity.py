"""docs/scaling.md has the tables that bench/capacity.py prints, from the figures of bench/README.md."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench/capacity.py"
MODEL = runpy.run_path(str(SCRIPT))
README = (ROOT / "bench/README.md").read_text()
FIGURES = README.partition("Redis Cluster, three primaries")[0]


def run(*arguments: str) -> str:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=True).stdout


def test_the_document_has_what_the_script_prints() -> None:
    document = (ROOT / "docs/scaling.md").read_text()
    parts = run().strip().split("\n\n")
    assert len(parts) == 3
    assert [part for part in parts if f"\n{part}\n" not in document] == []


def test_the_script_computes_any_load() -> None:
    assert "| 5,000 | 800 | 60,000 | 20 |" in run("5000", "800", "60000", "20")


def measured(row: str) -> float:
    (value,) = re.findall(rf"^\| {re.escape(row)} \|.*?\*\*([\d.,]+) \(", FIGURES, re.M)
    return float(value.replace(",", ""))


def test_the_constants_are_the_measured_ones() -> None:
    assert measured("C") == MODEL["REQUEST_US"]
    assert measured("C-cold") - measured("C") == MODEL["NEW_USER_US"]
    assert measured("B500") == MODEL["TOKEN_US"]
    assert measured("mem") == MODEL["STREAM_KIB"]
    assert f"| deliveries per CPU second, 64 accounts | {MODEL['DELIVERIES']:,} |" in README
    assert f"| request, of Redis | {MODEL['REDIS_US']} |" in README
    assert f"| second of an open stream, also while nothing arrives | {MODEL['STREAM_US']} |" in README
