"""The command line with the key of a new account, and with the operator token."""

from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend
from tests.support.accounts import Account, App
from tests.support.command_line import Tool
from tests.support.gateway_process import OPERATOR, Gateway


@pytest_asyncio.fixture(loop_scope="session")
async def account(gw: Gateway) -> Account:
    return await gw.account()


@pytest_asyncio.fixture(loop_scope="session")
async def app(account: Account, backend: FakeAppBackend) -> App:
    return await account.app(backend)


@pytest.fixture
def capsule(account: Account, tmp_path: Path) -> Tool:
    return Tool(account.gateway.address, account.key, tmp_path)


@pytest.fixture
def operator(gw: Gateway, tmp_path: Path) -> Tool:
    return Tool(gw.address, OPERATOR, tmp_path)


@pytest.fixture
def offline(tmp_path: Path) -> Tool:
    """Has no service."""
    return Tool("", "", tmp_path)


@pytest.fixture
def quick_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands that follow a deploy ask often."""
    monkeypatch.setattr("capsule_gateway.cli.deploys.POLL_SECONDS", 0.02)
