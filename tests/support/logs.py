"""Captures the log lines of a module."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs


@contextmanager
def captured(module: ModuleType) -> Iterator[list[dict[str, Any]]]:
    """Yields the module's lines as dictionaries.

    The module gets a new logger: once another test has run an app in this process, its own logger is cached and cannot
    be captured.
    """
    with pytest.MonkeyPatch.context() as patch, capture_logs() as lines:
        patch.setattr(module, "logger", structlog.get_logger())
        yield lines
