"""The agent tool `service_publish`: publishes the files of an app, and waits for the deploy."""

from __future__ import annotations

import asyncio
import base64
import io
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import Annotated, Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool

from gateway.accounts.pacing import leave_lane
from gateway.accounts.records import Account
from gateway.api.deploys import DeployView, view_with_log
from gateway.api.subjects import require_deploy, require_own_app
from gateway.deploys.states import FINAL
from gateway.mcp.deploys import LOG_CHARACTERS
from gateway.mcp.tools import ANYTHING, account_of, answer, make_tool, require_text, text, value
from gateway.services import Services

WAIT_SECONDS = 50.0  # clients give up on a call after a minute
POLL_SECONDS = 0.5
MAX_FILES = 2_000
PATH_CHARACTERS = 500
HOW = 'each file is {"path": "index.html", "text": "…"}, or has "base64" in place of "text"'

AppName = Annotated[str, ANYTHING, text("The app's name. It must exist: create it with service_app.")]
Files = Annotated[
    Any,
    ANYTHING,
    value(
        "array",
        "All files of the app's source: a page (index.html), or a folder with capsule.toml. They replace the source "
        "that was published before.",
        items={
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "The path in the source, such as assets/app.js."},
                "text": {"type": "string", "description": "The file's text."},
                "base64": {"type": "string", "description": "The content of a file that is not text."},
            },
            "required": ["path"],
        },
    ),
]
Wait = Annotated[
    Any,
    ANYTHING,
    value("boolean", "true: wait for the end of the deploy, up to 50 seconds, and show the end of its log."),
]


def read_files(files: Any) -> dict[str, bytes]:
    """Returns the contents by path. Raises ToolError, whose message says how to correct the call."""
    if not isinstance(files, list) or not files:
        raise ToolError(f"files is needed, a list of all files of the app's source: {HOW}.")
    if len(files) > MAX_FILES:
        raise ToolError(
            f"files has at most {MAX_FILES} files; publish a larger app with: capsule deploys publish APP DIR"
        )
    contents: dict[str, bytes] = {}
    for number, file in enumerate(files):
        path, content = _read_file(number, file)
        if path in contents:
            raise ToolError(f"files[{number}]: {path!r} is there twice.")
        contents[path] = content
    return contents


def _read_file(number: int, file: Any) -> tuple[str, bytes]:
    path = file.get("path") if isinstance(file, dict) else None
    if not isinstance(path, str) or not path or len(path) > PATH_CHARACTERS:
        raise ToolError(f"files[{number}]: {HOW}.")
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\\" in path or "\0" in path:
        raise ToolError(f"files[{number}]: a path is relative to the source, such as assets/app.js.")
    written, encoded = file.get("text"), file.get("base64")
    try:
        if isinstance(written, str) and encoded in (None, ""):
            return str(parts), written.encode()
        if isinstance(encoded, str) and written in (None, ""):
            return str(parts), base64.b64decode(encoded, validate=True)
    except ValueError:  # half a surrogate pair, or not base64
        pass
    raise ToolError(f"files[{number}]: {path!r} needs either text or base64.")


def pack(contents: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=3, format=tarfile.PAX_FORMAT) as tar:
        for path, content in contents.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755 if content.startswith(b"#!") else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


async def publish(services: Services, account: Account, name: str, files: Any, wait: bool) -> dict[str, Any]:
    app = await require_own_app(name, account, services.registry)
    packed = await asyncio.to_thread(lambda: pack(read_files(files)))
    deploy_id = await services.deploys.publish(app, _in_one_part(packed), "upload", size=len(packed), declared="tar")
    if wait:
        await _wait_for_end(services, account, deploy_id)
    deploy = await require_deploy(deploy_id, account, services.deploys)
    shown: dict[str, Any] = {"deployId": deploy_id, "deploy": DeployView.of(deploy)}
    if deploy.state in FINAL:
        shown["log"] = (await view_with_log(deploy, services.deploys)).log[-LOG_CHARACTERS:]
    else:
        shown["note"] = (
            "The deploy has not ended; call service_deploy with 'show' until its state is 'live' or 'failed'."
        )
    return shown


async def _in_one_part(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _wait_for_end(services: Services, account: Account, deploy_id: str) -> None:
    ends = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < ends and not services.process.draining:
        deploy = await services.deploys.get(deploy_id, account.id)
        if deploy is None or deploy.state in FINAL:
            return
        await asyncio.sleep(POLL_SECONDS)


def publish_tool(services: Services) -> Tool:
    async def service_publish(
        context: Context[Any], app: AppName = "", files: Files = "", wait: Wait = False
    ) -> dict[str, Any]:
        """Publish an app: its files are built as capsule.toml says, or served as they are, at the app's address."""
        name = require_text("app", app, "the app's name")
        request = context.request_context.request
        assert request is not None
        leave_lane(request.scope["state"])  # it takes long, and uploads have a limit of their own
        waits = wait in (True, "true")
        return await answer(publish(services, account_of(context), name, files, waits))

    return make_tool(service_publish, "Publish", required=["app", "files"])
