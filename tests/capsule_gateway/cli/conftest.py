"""The command line with the key of a new account, with the operator token, and at a stub of the service."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.server import Exchange, FakeServer, Script, answer
from tests.gateway.conftest import backend, building, hosted, provider
from tests.support.command_line import Tool
from tests.support.gateway_process import OPERATOR

__all__ = ["backend", "building", "hosted", "provider"]


class Service(FakeServer):
    """Answers the calls in `answers` with these values, and others with `replies` in turn, of which the last stays."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {}  # by method and path
        self.replies: list[Script] = [answer(200, {})]

    def script(self, exchange: Exchange) -> Script:
        call = f"{exchange.method} {exchange.path.partition('?')[0]}"
        if call in self.answers:
            return answer(200, self.answers[call])
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    @property
    def calls(self) -> list[str]:
        return [f"{each.method} {each.path}" for each in self.exchanges]


@pytest_asyncio.fixture(loop_scope="session")
async def service() -> AsyncIterator[Service]:
    async with Service() as service:
        yield service


@pytest.fixture
def stubbed(service: Service, tmp_path: Path) -> Tool:
    return Tool(service.address, "csk_key", tmp_path)


@pytest.fixture
def operator(service: Service, tmp_path: Path) -> Tool:
    return Tool(service.address, OPERATOR, tmp_path)


@pytest.fixture
def offline(tmp_path: Path) -> Tool:
    """Has no service."""
    return Tool("", "", tmp_path)


@pytest.fixture
def quick_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands that follow a deploy ask often."""
    monkeypatch.setattr("capsule_gateway.cli.deploys.POLL_SECONDS", 0.02)
