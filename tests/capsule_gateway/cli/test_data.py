"""`capsule data`, with a service whose answers the test determines."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.server import Exchange, FakeServer, Head, Script, answer
from tests.support.command_line import Tool

pytestmark = pytest.mark.asyncio(loop_scope="session")

SNAPSHOT = {"id": "snp_1", "at": "2026-07-02T10:00:00.000Z", "bytes": 2_048, "reason": "deploy", "deployId": "dep_1"}
FULL = {"usedBytes": 3 << 20, "limitBytes": 2 << 20, "state": "full", "snapshots": [SNAPSHOT], "problem": "Clear them."}
PACKED = b"\x1f\x8b packed"
DELETED = [{"app": "old", "appId": "old", "deletedAt": SNAPSHOT["at"], "snapshots": [SNAPSHOT]}]
ANSWERS: dict[tuple[str, str], Script] = {
    ("GET", "/account/apps/shop/data"): answer(200, FULL),
    ("POST", "/account/apps/shop/data/snapshots"): answer(201, SNAPSHOT),
    ("GET", "/account/apps/shop/data/snapshots/snp_1"): [
        Head(200, {"Content-Type": "application/gzip", "Content-Length": str(len(PACKED))}),
        PACKED,
    ],
    ("POST", "/account/apps/shop/data/restore"): answer(202, {"deployId": "dep_2"}),
    ("DELETE", "/account/apps/shop/data"): answer(200, {}),
    ("GET", "/account/apps/pages/data"): answer(
        200, {"usedBytes": 0, "limitBytes": 1, "state": "none", "snapshots": []}
    ),
    ("GET", "/account/data/deleted"): answer(200, DELETED),
}
ERROR = {"error": {"code": "NOT_FOUND", "message": "There is no such app.", "requestId": "r1"}}


class Service(FakeServer):
    def script(self, exchange: Exchange) -> Script:
        return ANSWERS.get((exchange.method, exchange.path)) or answer(404, ERROR)


@pytest_asyncio.fixture(loop_scope="session")
async def service() -> AsyncIterator[Service]:
    async with Service() as service:
        yield service


@pytest.fixture
def capsule(service: Service, tmp_path: Path) -> Tool:
    return Tool(service.address, "csk_key", tmp_path)


async def test_show(capsule: Tool) -> None:
    shown = (await capsule("data", "show", "shop")).out
    for text in ("full", "3 MB of 2 MB", "Clear them.", "snp_1", "2 KB", "deploy", "dep_1"):
        assert text in shown
    assert (await capsule("data", "show", "shop", "--json")).json == FULL
    assert (await capsule("data", "show", "pages")).out.endswith("Snapshots:\nnone\n")
    assert "NOT_FOUND" in await capsule.refused("data", "show", "other")


async def test_snapshot_restore_and_deleted(capsule: Tool, service: Service) -> None:
    assert (await capsule("data", "snapshot", "shop")).line == "Made snapshot snp_1 (2 KB)."
    queued = await capsule("data", "restore", "shop", "snp_1")
    details = f"Details: {service.address}/dashboard#/deploys/dep_2\n"
    assert queued.out == f"Queued as dep_2.\n{details}Follow it with: capsule deploys show dep_2 --follow\n"
    assert service.exchanges[-1].json == {"snapshotId": "snp_1"}
    _, row = (await capsule("data", "deleted")).rows
    assert row[:2] == ["old", "snp_1"]


async def test_download(capsule: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert (await capsule("data", "download", "shop")).line == "Wrote shop-snp_1.tar.gz (9 bytes)."
    assert Path("shop-snp_1.tar.gz").read_bytes() == PACKED
    await capsule("data", "download", "shop", "snp_1", "-o", "mine.tar.gz")
    assert Path("mine.tar.gz").read_bytes() == PACKED
    assert "NOT_FOUND" in await capsule.refused("data", "download", "shop", "snp_2", "-o", "other")
    assert sorted(path.name for path in Path().iterdir()) == ["mine.tar.gz", "shop-snp_1.tar.gz"]
    refused = await capsule.refused("data", "download", "shop", "snp_1", "-o", "none/mine.tar.gz", code=2)
    assert "there is no folder none to write mine.tar.gz to" in refused


async def test_clear_needs_a_confirmation(capsule: Tool, service: Service) -> None:
    assert "add --yes" in await capsule.refused("data", "clear", "shop", code=2)
    assert service.exchanges == []
    assert "Cleared the data of shop." in (await capsule("data", "clear", "shop", "--yes")).line
    assert [exchange.method for exchange in service.exchanges] == ["DELETE"]
