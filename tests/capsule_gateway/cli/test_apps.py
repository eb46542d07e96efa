"""`capsule env`, `capsule logs` and `capsule data` of an app."""

import asyncio
from pathlib import Path

import pytest

from tests.capsule_gateway.cli.conftest import Service
from tests.fakes.server import CLOSE, Head, answer
from tests.support.command_line import Tool, start_process

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_file_of_variables(stubbed: Tool, service: Service, tmp_path: Path) -> None:
    file = tmp_path / "variables"
    file.write_text("# a comment\nexport A = one\n\nB='two words'\n", encoding="utf-16")
    assert (await stubbed("env", "set", "shop", "--file", str(file), "--json")).json == {"set": ["A", "B"]}
    assert service.exchanges[0].json == {"A": "one", "B": "two words"}


async def test_wrong_usage(offline: Tool, tmp_path: Path) -> None:
    file = tmp_path / "variables"
    file.write_text("GOOD=1\na secret line\n")
    for arguments, words in (
        (("TOKEN=on-the-line",), "keep the value off the command line"),
        ((), "either a NAME or --file"),
        (("--file", str(file)), "line 2: use NAME=value"),
    ):
        said = await offline.refused("env", "set", "shop", *arguments, code=2)
        assert words in said
        assert "on-the-line" not in said
        assert "secret" not in said


async def test_logs_are_printed(stubbed: Tool, service: Service) -> None:
    service.replies = [answer(200, b"one\ntwo \x1b[31mred\n")]
    assert (await stubbed("logs", "shop", "--since", "1h", "--until", "30s")).out == "one\ntwo [31mred\n"
    await stubbed("logs", "shop", "--tail", "2")
    assert service.calls == [f"GET /account/apps/shop/logs?{query}" for query in ("since=1h&until=30s", "tail=2")]


async def test_logs_are_followed(stubbed: Tool, service: Service) -> None:
    """Line by line, and on when the service restarts."""
    more, refused = asyncio.Event(), {"error": {"code": "NOT_FOUND", "message": "Gone.", "requestId": "r1"}}
    stream = [Head(), b"data: three\n\n", more, b"data: four\n\n", CLOSE]
    service.replies = [stream, answer(503), answer(404, refused)]
    with start_process(stubbed, "logs", "shop", "--tail", "2", "--follow") as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "three\n"
        more.set()
        out, err = await asyncio.to_thread(process.communicate, timeout=20)
    assert (process.returncode, out) == (1, "four\n")
    assert err == "capsule: Gone. (NOT_FOUND, request r1)\n"
    assert service.calls == [f"GET /account/apps/shop/logs?tail={lines}" for lines in (2, 1, 1)]


PACKED = b"\x1f\x8b packed"


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
