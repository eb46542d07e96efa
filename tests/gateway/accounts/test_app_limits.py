"""A limit of an app has one name in its record, the API, the log of requests and the dashboard."""

from typing import Any

import msgspec
import pytest

from gateway.accounts.app_limits import APP_LIMITS
from gateway.accounts.records import AppLimits
from gateway.inference.spend.limits import LimitsView, WidestLimits
from gateway.telemetry.usage import LIMIT_NAMES


@pytest.mark.parametrize("struct", [AppLimits, LimitsView, WidestLimits])
def test_each_record_has_the_same_fields(struct: Any) -> None:
    assert [field.name for field in msgspec.structs.fields(struct)] == list(APP_LIMITS)


def test_the_log_of_requests_has_them_after_the_accounts_cap() -> None:
    assert ("cap", *APP_LIMITS) == LIMIT_NAMES
