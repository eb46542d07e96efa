"""The transports that agents use."""

import pytest

from tests.support.agents import Connect, over_http, over_stdio


@pytest.fixture(params=[over_stdio, over_http()], ids=["stdio", "http"])
def connect(request: pytest.FixtureRequest) -> Connect:
    return request.param
