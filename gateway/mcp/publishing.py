"""The agent tool `service_publish`."""

import asyncio
import base64
import io
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import Annotated, Any

from mcp.server.mcpserver.exceptions import ToolError

from gateway.accounts.pacing import leave_lane
from gateway.api.deploys import DeployView, view_with_log
from gateway.deploys.states import FINAL
from gateway.mcp.deploys import LOG_CHARACTERS
from gateway.mcp.tools import AgentTool, Arg

WAIT_SECONDS = 50.0  # clients give up on a call after a minute
POLL_SECONDS = 0.5
MAX_FILES = 2_000
PATH_CHARACTERS = 500
HOW = 'each file is {"path": "index.html", "text": "…"}, or has "base64" in place of "text"'

AppName = Annotated[str, Arg("the app's name", hint=". It must exist: create it with service_app")]
Files = Annotated[
    Any,
    Arg(
        "all files of the app's source",
        "array",
        hint=": a page (index.html), or a folder with capsule.toml. They replace the source that was published before",
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
    Any, Arg("whether to wait for the end of the deploy, up to 50 seconds, and show the end of its log", "boolean")
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


async def _in_one_part(content: bytes) -> AsyncIterator[bytes]:
    yield content


class PublishTool(AgentTool):
    """Publish an app: its files are built as capsule.toml says, or served as they are, at the app's address."""

    name, title = "service_publish", "Publish"

    async def run(self, app: AppName, files: Files, wait: Wait = False) -> dict[str, Any]:
        leave_lane(self.scope["state"])  # it takes long, and uploads have a limit of their own
        found, deploys = await self.app(app), self.services.deploys
        packed = await asyncio.to_thread(lambda: pack(read_files(files)))
        deploy_id = await deploys.publish(found, _in_one_part(packed), "upload", size=len(packed), declared="tar")
        if wait in (True, "true"):
            await self._wait_for_end(deploy_id)
        deploy = await self.deploy(deploy_id)
        shown: dict[str, Any] = {"deployId": deploy_id, "deploy": DeployView.of(deploy)}
        if deploy.state in FINAL:
            shown["log"] = (await view_with_log(deploy, deploys)).log[-LOG_CHARACTERS:]
        else:
            shown["note"] = (
                "The deploy has not ended; call service_deploy with 'show' until its state is 'live' or 'failed'."
            )
        return shown

    async def _wait_for_end(self, deploy_id: str) -> None:
        ends = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < ends and not self.services.process.draining:
            deploy = await self.services.deploys.get(deploy_id, self.account.id)
            if deploy is None or deploy.state in FINAL:
                return
            await asyncio.sleep(POLL_SECONDS)
