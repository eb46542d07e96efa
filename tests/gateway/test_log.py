"""A logged exception has its traceback, without values of local variables."""

import subprocess
import sys

import pytest

FAULT = """
import logging
import structlog
from gateway import log
from gateway.settings import Settings

log.configure(Settings(log_format={form!r}))

def fails(secret):
    raise ValueError("what happened")

try:
    fails("csk_" + "not to be read")
except ValueError as error:
    structlog.get_logger().error("ours", exc_info=error)
    logging.getLogger("a.library").error("theirs", exc_info=error)
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_tracebacks_contain_no_local_variables(form: str) -> None:
    output = subprocess.run(
        [sys.executable, "-c", FAULT.format(form=form)], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    assert output.count("ValueError: what happened") == 2
    assert "ours" in output
    assert "theirs" in output
    assert "csk_not" not in output
