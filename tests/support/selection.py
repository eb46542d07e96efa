"""Which tests a run takes, of several that share none and until when, and how many examples of the costly ones."""

import time
from pathlib import Path

import pytest


class Record:
    """Adds the name of each test that passed to a file, one a line."""

    def __init__(self, file: Path) -> None:
        self._file, self._others = file.open("a", buffering=1), set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._others.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._others:
            self._file.write(report.nodeid + "\n")


class Deadline:
    """Starts no test after the time, in seconds of the monotonic clock. The summary says how many were left out."""

    def __init__(self, ends: float) -> None:
        self._ends, self._reported = ends, set[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.monotonic() > self._ends else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reported.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        collected = terminalreporter._session.testscollected if terminalreporter._session else 0
        if missing := collected - len(self._reported):
            terminalreporter.section("time is over")
            terminalreporter.line(f"{missing} of {collected} tests were left out, because the time was over")


def with_more_in_test_all(parameter: str, few: int, many: int) -> pytest.MarkDecorator:
    """Runs a test with `few` rounds in `make test`, which every commit repeats, and with `many` in `make test-all`."""
    return pytest.mark.parametrize(parameter, [few, pytest.param(many, marks=pytest.mark.long)])


def leave_out(file: Path, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes the tests that the file names."""
    names = set(file.read_text().splitlines()) if file.exists() else set[str]()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]
