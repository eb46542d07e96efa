"""The Locust file of docs/load-testing.md, run by the page's own commands for a few seconds.

The k6 script is not run here, because the makers of k6 publish no package on PyPI, Debian or npm.
"""

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Run, run_shell, sections
from tests.fakes import FakeAppBackend
from tests.fakes.provider import COMPLETIONS
from tests.support.accounts import Account
from tests.support.gateway_process import OPERATOR, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

FULL = "-u 200 -r 10 -t 5m"
SHORT = "-u 3 -r 3 -t 4s --stop-timeout 5"
INSTALL = "pip install locust\n"


async def test_locust(gateway: Gateway, account: Account, backend: FakeAppBackend, tmp_path: Path) -> None:
    addresses = {
        "https://api.example.com": gateway.address,
        "https://load.apps.example.com": backend.address,
        FULL: SHORT,
    }
    page = sections("load-testing.md", addresses)
    prepare, commands = page["Prepare"].take("sh"), page["Run"].take("sh")
    assert SHORT in commands

    operator = prepare.replace("acc_…", account.id).replace('"jwks"', f'"jwks", "url": "{backend.jwks_url}"')
    prepared = await run_shell(operator.replace("<the operator token>", OPERATOR), tmp_path)
    assert prepared.code == 0, prepared.err
    refused = await account.app(backend)
    limits = f"/account/apps/{refused.name}/limits"
    assert (await account.call("PUT", limits, {"requestsPerMinute": 0})).is_success

    assert commands.startswith(INSTALL)
    folder = shlex.quote(str(tmp_path / "env"))
    install = f"{shlex.quote(sys.executable)} -m venv {folder}; {folder}/bin/{INSTALL}"
    installed = await run_shell(install, tmp_path, **os.environ, PIP_NO_COMPILE="1")
    assert installed.code == 0, installed.err

    load = f"export PATH={folder}/bin:$PATH; {commands.removeprefix(INSTALL)}"
    answered, limited = await asyncio.gather(
        run_shell(load, DOCS), run_shell(load.replace("CAPSULE_APP=load", f"CAPSULE_APP={refused.name}"), DOCS)
    )
    assert answered.code == 0, answered.err
    answers, failures = row(answered, "answer")
    assert answers > 0
    assert failures == 0
    assert row(answered, "first token")[0] == row(answered, "time per token")[0] == answers
    speed = re.search(r"^(\d+) tokens per second", answered.out, re.MULTILINE)
    assert speed is not None
    assert int(speed[1]) >= answers * len(COMPLETIONS) // 10

    assert limited.code == 1  # Locust's, if requests failed
    requests, failures = row(limited, "refused")
    assert requests == failures > 0
    assert "refused: 429 APP_RATE_LIMITED" in limited.out + limited.err


def row(done: Run, name: str) -> tuple[int, int]:
    """Returns requests and failures from the last table."""
    found = re.findall(rf"^\w+ +{name} +(\d+) +(\d+)\(", done.out + done.err, re.MULTILINE)
    assert found, done.out + done.err
    return int(found[-1][0]), int(found[-1][1])
