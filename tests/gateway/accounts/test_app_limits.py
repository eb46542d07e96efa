"""A limit of an app has one name in its record, the API, the log of requests and the dashboard."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.accounts.app_limits import APP_LIMITS
from gateway.accounts.records import AppLimits
from gateway.inference.spend.limits import LimitsView, WidestLimits
from gateway.telemetry.usage import LIMIT_NAMES

PAGES = Path(__file__).parents[3] / "gateway/pages/dashboard"


@pytest.mark.parametrize("struct", [AppLimits, LimitsView, WidestLimits])
def test_each_record_has_the_same_fields(struct: Any) -> None:
    assert [field.name for field in msgspec.structs.fields(struct)] == list(APP_LIMITS)


def test_the_log_of_requests_has_them_after_the_accounts_cap() -> None:
    assert ("cap", *APP_LIMITS) == LIMIT_NAMES


def test_the_form_has_them_under_the_same_labels() -> None:
    text = (PAGES / "limits.js").read_text()
    found = re.findall(r'^  (\w+): \["(.*)", (AMOUNT|NUMBER)\],$', text, re.MULTILINE)
    assert found == [
        (name, f"{'Euros' if limit.is_money else 'Requests'} {limit.label}", "AMOUNT" if limit.is_money else "NUMBER")
        for name, limit in APP_LIMITS.items()
    ]


def test_a_refused_requests_page_names_each() -> None:
    text = (PAGES / "request.js").read_text()
    table = re.search(r"^const LIMITS = \{(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    assert table is not None
    assert re.findall(r"^  (\w+):", table[1], re.MULTILINE) == list(LIMIT_NAMES)
