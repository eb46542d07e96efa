"""Keepers of data start no program of the host to see which versions it has."""

import pytest

from workers.sandbox import tools


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "find_node", lambda *_: None)
    monkeypatch.setattr(tools, "find_versions", lambda *_: [])
