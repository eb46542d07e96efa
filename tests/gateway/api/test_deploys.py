"""Lists of deploys in pages, over HTTP. The test is the deploy engine."""

import base64
import io
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import App
from tests.support.deploys import TARBALL
from tests.support.gateway_process import gateway
from tests.support.programs import on_small_disk
from tests.support.redis_servers import RedisServer
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def listed(app: App, query: str) -> Any:
    return (await app.account.get(f"/account/deploys?{query}")).json()


async def test_pages_of_deploys(hosted: App) -> None:
    other = await hosted.account.app(hosted.backend, repository={"url": "https://git.example/x.git", "branch": "main"})
    names = [other.name if n % 3 else hosted.name for n in range(7)]
    body = {"account": hosted.account.id, "repository": {"url": "https://git.example/y.git", "branch": "main"}}
    assert (await hosted.gateway.platform("PUT", f"apps/{hosted.name}", body)).is_success
    for name in names:
        assert (await hosted.gateway.platform("POST", f"apps/{name}/deploys", {"kind": "live"})).is_success
    everything = await listed(hosted, "limit=1000")
    assert [row["app"] for row in everything] == names[::-1]
    assert await listed(hosted, "app=another") == []
    for query, rows in (("", everything), (f"&app={other.name}", [r for r in everything if r["app"] == other.name])):
        pages, before = [], ""
        while page := await listed(hosted, f"limit=2{query}{before}"):
            pages.append(page)
            before = f"&before={page[-1]['id']}"
        assert [len(page) for page in pages[:-1]] == [2] * (len(pages) - 1)
        assert [row["id"] for page in pages for row in page] == [row["id"] for row in rows]
    for query, message in (("before=dep_none", "before: there is no deploy of this id"), ("limit=0", "limit: must be")):
        assert (await listed(hosted, query))["error"]["message"].startswith(message)


# -- sources of every Content-Type ----------------------------------------------------------------------------


PAGE = b"<!doctype html><title>Notes</title>"


def a_zip(name: str = "index.html") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr(name, PAGE)
    return file.getvalue()


async def put(app: App, content: bytes, kind: str | None) -> httpx.Response:
    headers = {} if kind is None else {"Content-Type": kind}
    return await app.account.call("PUT", f"/account/apps/{app.name}/source", content=content, headers=headers)


async def source_of(app: App, deploy: str) -> dict[str, bytes]:
    """Returns the files that a build of this deploy gets."""
    stored = await app.gateway.platform("GET", f"deploys/{deploy}/source")
    with tarfile.open(fileobj=io.BytesIO(stored.content)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


@pytest.mark.parametrize("content", [PAGE, a_zip()], ids=["page", "zip"])
async def test_the_type_or_the_first_bytes_say_what_it_is(hosted: App, content: bytes) -> None:
    declared = ["text/html; charset=utf-8"] if content == PAGE else ["Application/ZIP", "application/x-zip-compressed"]
    for kind in (*declared, None, "application/octet-stream", "application/x-www-form-urlencoded"):
        response = await put(hosted, content, kind)
        assert response.status_code == 202, response.text
        assert await source_of(hosted, response.json()["deployId"]) == {"index.html": PAGE}
    for kind in ("application/gzip", "application/x-gzip"):
        assert (await put(hosted, TARBALL, kind)).status_code == 202
    assert (await put(hosted, PAGE.decode().encode("utf-16"), None)).status_code == 202


async def test_what_is_outside_the_bounds_is_refused(hosted: App) -> None:
    error = refused(await put(hosted, PAGE, "application/x-tar"), 415, "MEDIA_TYPE_UNSUPPORTED")
    assert "application/zip" in error["message"]
    error = refused(await put(hosted, a_zip("../x"), None), 400, "REQUEST_MALFORMED")
    assert error["message"].startswith("The zip contains '../x', which leaves its folder.")
    for content, kind in ((a_zip(), "application/gzip"), (b"", "text/html")):
        refused(await put(hosted, content, kind), 400, "REQUEST_MALFORMED")
    assert (await hosted.account.get(f"/account/deploys?app={hosted.name}")).json() == []


async def test_a_full_disk_is_said_to_be_full(
    valkey: RedisServer, provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path
) -> None:
    """The upload is larger than the disk, or there is no room beside it to pack it."""
    data = tmp_path / "data"
    data.mkdir()
    async with gateway(valkey.url, provider, tmp_path, prefix=on_small_disk(data), GATEWAY_DATA_DIR=str(data)) as gw:
        app = await gw.app(backend)
        for content, kind in (
            (b"\x1f\x8b" + os.urandom(2_000_000), "application/gzip"),
            (b"<!doctype html>" + base64.b64encode(os.urandom(525_000)), "text/html"),
        ):
            response = await put(app, content, kind)
            error = refused(response, 507, "STORAGE_FULL")
            assert error["message"].startswith("The disk of the service is full; nothing was stored.")
            assert "Retry-After" not in response.headers
        assert (await put(app, PAGE, "text/html")).status_code == 202, "nothing was left on the disk"
