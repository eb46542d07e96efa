"""`capsule data download`, from a service whose answers the test determines."""

from pathlib import Path

import pytest

from tests.capsule_gateway.cli.conftest import Service
from tests.fakes.server import answer
from tests.support.command_line import Tool

PACKED = b"\x1f\x8b packed"


@pytest.mark.asyncio(loop_scope="session")
async def test_download(stubbed: Tool, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    service.answers["GET /account/apps/shop/data"] = {"state": "ok", "snapshots": [{"id": "snp_1"}, {"id": "snp_0"}]}
    service.answers["GET /account/apps/shop/data/snapshots/snp_1"] = PACKED
    service.replies = [answer(404, {"error": {"code": "NOT_FOUND", "message": "None.", "requestId": "r1"}})]
    assert (await stubbed("data", "download", "shop")).line == "Wrote shop-snp_1.tar.gz (9 bytes)."
    assert Path("shop-snp_1.tar.gz").read_bytes() == PACKED
    await stubbed("data", "download", "shop", "snp_1", "-o", "mine.tar.gz")
    assert Path("mine.tar.gz").read_bytes() == PACKED
    assert "NOT_FOUND" in await stubbed.refused("data", "download", "shop", "snp_2", "-o", "other")
    assert sorted(path.name for path in Path().iterdir()) == ["mine.tar.gz", "shop-snp_1.tar.gz"]
    refused = await stubbed.refused("data", "download", "shop", "snp_1", "-o", "none/mine.tar.gz", code=2)
    assert "there is no folder none to write mine.tar.gz to" in refused
