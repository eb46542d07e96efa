"""`capsule data download`, from a service whose answers the test determines."""

from pathlib import Path

import pytest

from tests.fakes.server import Exchange, FakeServer, Head, Script, answer
from tests.support.command_line import Tool

PACKED = b"\x1f\x8b packed"
SNAPSHOTS = {"state": "ok", "snapshots": [{"id": "snp_1"}, {"id": "snp_0"}]}


class Service(FakeServer):
    def script(self, exchange: Exchange) -> Script:
        if exchange.path == "/account/apps/shop/data":
            return answer(200, SNAPSHOTS)
        if exchange.path == "/account/apps/shop/data/snapshots/snp_1":
            return [Head(200, {"Content-Type": "application/gzip", "Content-Length": str(len(PACKED))}), PACKED]
        return answer(404, {"error": {"code": "NOT_FOUND", "message": "There is no such app.", "requestId": "r1"}})


async def test_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    async with Service() as service:
        capsule = Tool(service.address, "csk_key", tmp_path)
        assert (await capsule("data", "download", "shop")).line == "Wrote shop-snp_1.tar.gz (9 bytes)."
        assert Path("shop-snp_1.tar.gz").read_bytes() == PACKED
        await capsule("data", "download", "shop", "snp_1", "-o", "mine.tar.gz")
        assert Path("mine.tar.gz").read_bytes() == PACKED
        assert "NOT_FOUND" in await capsule.refused("data", "download", "shop", "snp_2", "-o", "other")
        assert sorted(path.name for path in Path().iterdir()) == ["mine.tar.gz", "shop-snp_1.tar.gz"]
        refused = await capsule.refused("data", "download", "shop", "snp_1", "-o", "none/mine.tar.gz", code=2)
        assert "there is no folder none to write mine.tar.gz to" in refused
