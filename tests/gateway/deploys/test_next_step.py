"""What a failed deploy says to do next: the variable that its log says is missing, in the words of many tools."""

import time
from typing import Any

import pytest

from gateway.deploys.next_step import NextStep, find_missing_variable, find_next_step
from gateway.deploys.records import Deploy

PYDANTIC = """\
pydantic_core._pydantic_core.ValidationError: 2 validation errors for Settings
api_url
  Field required [type=missing, input_value={}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.11/v/missing
database_url
  Field required [type=missing, input_value={}, input_type=dict]
"""


@pytest.mark.parametrize(
    "log",
    [
        '  File "/app/main.py", line 3, in <module>\n    os.environ["DATABASE_URL"]\nKeyError: \'DATABASE_URL\'',
        "KeyError: 'API_URL'\nrestarting\n\x1b[31mKeyError: 'DATABASE_URL'\x1b[0m",
        PYDANTIC,
        "django.core.exceptions.ImproperlyConfigured: Set the DATABASE_URL environment variable",
        'environs.exceptions.EnvError: Environment variable "DATABASE_URL" not set',
        "Error: process.env.DATABASE_URL is undefined",
        "Error: Missing environment variable: DATABASE_URL",
        "Error: DATABASE_URL is not set",
    ],
)
def test_the_name_of_a_missing_variable(log: str) -> None:
    assert find_missing_variable(f"starting\n{log}\nlast line\n") == "DATABASE_URL"


@pytest.mark.parametrize(
    "log",
    [
        "KeyError: 'name'",
        "Listening at $PORT; PORT is not set",
        "DATABASE_URL is set",
        "error TS2304: Cannot find name 'URL'.",
    ],
)
def test_other_lines_name_none(log: str) -> None:
    assert find_missing_variable(log) is None


@pytest.mark.parametrize("part", ["A", "environment variable ", "AB is ", "a\n Field "])
def test_a_long_log_is_read_quickly(part: str) -> None:
    began = time.process_time()
    find_missing_variable(part * (262_144 // len(part)))
    assert time.process_time() - began < 0.5


def failed(error: str, **fields: Any) -> Deploy:
    record = {"id": "dep_1", "account": "acc_1", "app": "shop", "appId": "shop", "kind": "live", "state": "failed"}
    times = {"trigger": "upload", "createdAt": "2026-07-02T10:00:00.000Z"}
    return Deploy(**{**record, **times, "error": error, **fields})


def test_the_next_step() -> None:
    step = find_next_step(failed("health: the start command ended with status 1"), "KeyError: 'TOKEN'")
    text = "The log says that the variable TOKEN is missing. Set it, and deploy again."
    assert step == NextStep(text, "capsule env set shop TOKEN", "TOKEN")
    step = find_next_step(failed("health: the start command ended with status 1", kind="preview"), "KeyError: 'TOKEN'")
    text = "The log says that the variable TOKEN is missing. Set it for previews, and deploy again."
    assert step == NextStep(text, "capsule env set shop TOKEN --preview", "TOKEN"), "the live value stays"
    built = {"startedAt": "2026-07-02T10:00:01.000Z"}
    checked = built | {"checkingAt": "2026-07-02T10:00:02.000Z"}
    steps: list[tuple[str, dict[str, Any], str]] = [
        ("build: health: x", built, "why the build failed"),
        ("health: x", checked, "health check"),
        ("canary: x", {**checked, "canaryAt": "2026-07-02T10:00:03.000Z"}, "while visitors used it"),
        ("health: x", {**checked, "serviceFault": True}, "tell the service's operators"),
        ("build: the test ended with status 1: it failed; deploy again", built, "why the build failed"),
        ("capsule.toml, line 3: KeyError: 'TOKEN'", built, "Correct capsule.toml"),
    ]
    for error, fields, text in steps:
        found = find_next_step(failed(error, **fields), "")
        assert found is not None
        assert text in found.text
    assert find_next_step(failed("", state="live"), "KeyError: 'TOKEN'") is None
