"""What a module logs, as the tests see it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs


@contextmanager
def captured(module: ModuleType) -> Iterator[list[dict[str, Any]]]:
    """Its lines, as dictionaries.

    It gets a new logger: once an app of another test has run in this process, the module's own is cached, and cannot be
    captured.
    """
    with pytest.MonkeyPatch.context() as patch, capture_logs() as lines:
        patch.setattr(module, "logger", structlog.get_logger())
        yield lines
