"""Sources of every Content-Type, over HTTP."""

import io
import tarfile
import zipfile

import httpx
import pytest

from tests.support.accounts import App
from tests.support.deploys import TARBALL
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

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


async def test_other_types_are_refused(hosted: App) -> None:
    for kind in ("text/plain", "application/json", "application/x-tar", "image/png", "text/html-or-so"):
        error = refused(await put(hosted, PAGE, kind), 415, "MEDIA_TYPE_UNSUPPORTED")
        assert "application/zip" in error["message"]


async def test_what_is_outside_the_bounds_is_refused(hosted: App) -> None:
    error = refused(await put(hosted, a_zip("../x"), None), 400, "REQUEST_MALFORMED")
    assert error["message"].startswith("The zip contains '../x', which leaves its folder.")
    refused(await put(hosted, a_zip(), "application/gzip"), 400, "REQUEST_MALFORMED")
    refused(await put(hosted, b"", "text/html"), 400, "REQUEST_MALFORMED")
    assert (await hosted.account.get(f"/account/deploys?app={hosted.name}")).json() == []
