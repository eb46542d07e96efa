"""The agent tools of deploys: `service_deploy`, `service_publish`, `service_logs`, `service_env` and `service_hook`."""

import asyncio
import base64
import io
import tarfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import PurePosixPath
from types import UnionType
from typing import Annotated, Any, get_args

import msgspec
from mcp.server.mcpserver.exceptions import ToolError

from gateway.accounts.pacing import leave_lane
from gateway.api.bodies import decode_map
from gateway.deploys.addresses import BRANCH_LENGTH, Branch, address_url
from gateway.deploys.records import FINAL, MESSAGE_LENGTH, Origin
from gateway.deploys.views import DeployView, view_deploys
from gateway.errors import NotFound
from gateway.events.catalog import Kind
from gateway.mcp.tools import LOG_CHARACTERS, AgentTool, AppName, Arg, Result

LISTED_DEPLOYS = 20

DeployId = Annotated[str, Arg("the deploy's id, from 'list'")]

Slug = Annotated[str, Arg("the part of the preview's host name between '--p-' and the first dot")]


class DeployTool(AgentTool):
    """List and show deploys, roll back to an earlier release, cancel a deploy, or end a preview."""

    name, title = "service_deploy", "Deploys"

    async def list(self, app: AppName = "") -> Result:
        """List the newest deploys, of all apps or of `app`."""
        deploys = await self.services.deploy_records.list(self.account.id, app or None, LISTED_DEPLOYS)
        return {"deploys": await view_deploys(deploys, self.services.deploy_records)}

    async def show(self, id: DeployId) -> Result:
        """Show the deploy with this `id`, and the end of its log."""
        found = await self._find_deploy(id)
        return {"deploy": await self._show_deploy(found)}

    async def rollback(self, app: AppName, id: DeployId = "") -> Result:
        """Serve an earlier release of `app` again: the release of deploy `id`, or the previous one."""
        found = await self._find_app(app)
        note = "A new deploy serves the earlier release; 'show' it until its state is 'live' or 'failed'."
        by = self.access.name
        return {"deployId": await self.services.deploy_actions.roll_back(found, id or None, by), "note": note}

    async def cancel(self, id: DeployId) -> Result:
        """Cancel the deploy with this `id`, if it is queued or building."""
        found = await self._find_deploy(id)
        return {"deploy": DeployView.of(await self.services.deploy_actions.cancel(found))}

    async def end_preview(self, app: AppName, slug: Slug) -> Result:
        """End the preview of `app` with this `slug`; its address answers 404 from then on."""
        await self.services.deploy_actions.end_preview(await self._find_app(app), slug)
        return {"ended": slug}


WAIT_SECONDS = 50.0  # clients give up on a call after a minute
POLL_SECONDS = 0.5
MAX_FILES, PATH_CHARACTERS = 2_000, 500
HOW = 'each file is {"path": "index.html", "text": "…"}, or has "base64" in place of "text"'
FILE_FIELDS = {
    "path": {"type": "string", "description": "The path in the source, such as assets/app.js."},
    "text": {"type": "string", "description": "The file's text."},
    "base64": {"type": "string", "description": "The content of a file that is not text."},
}
FILE = {"type": "object", "properties": FILE_FIELDS, "required": ["path"]}
SOURCE = (
    "all files of the app's source: a page (index.html), or a folder with capsule.toml. They replace the source that "
    "was published before"
)
PublishedApp = Annotated[str, Arg("the app's name. It must exist: create it with service_app")]
Files = Annotated[Any, Arg(SOURCE, "array", items=FILE)]
PREVIEW = "publish a preview of this branch, at an address of its own; the live app stays as it is"
Preview = Annotated[str, Arg(PREVIEW, maxLength=BRANCH_LENGTH)]
Message = Annotated[str, Arg("what has changed, in one line", maxLength=MESSAGE_LENGTH)]
Wait = Annotated[Any, Arg("wait for the end of the deploy, up to 50 seconds, and show the end of its log", "boolean")]


def pack(files: Any) -> bytes:
    """Returns the files as a tar.gz. Raises ToolError, whose message says how to correct the call."""
    if not isinstance(files, list) or not files:
        raise ToolError(f"files is needed, a list of all files of the app's source: {HOW}.")
    if len(files) > MAX_FILES:
        raise ToolError(
            f"files has at most {MAX_FILES} files; publish a larger app with: capsule deploys publish APP DIR"
        )
    packed, paths = io.BytesIO(), set()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=3, format=tarfile.PAX_FORMAT) as tar:
        for number, file in enumerate(files):
            path, content = _read_file(number, file)
            if path in paths:
                raise ToolError(f"files[{number}]: {path!r} is there twice.")
            paths.add(path)
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755 if content.startswith(b"#!") else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


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


def _read_branch(name: str) -> str | None:
    """Returns the branch of a preview; None for a live deploy. Raises ToolError."""
    try:
        return msgspec.convert(name, Branch) if name else None
    except msgspec.ValidationError:
        raise ToolError("preview is the name of a branch, such as feature/login.") from None


async def _in_one_part(content: bytes) -> AsyncIterator[bytes]:
    yield content


class PublishTool(AgentTool):
    """Publish an app: its files are built as capsule.toml says, or served as they are, at the app's address."""

    name, title = "service_publish", "Publish"

    async def publish(
        self, app: PublishedApp, files: Files, preview: Preview = "", message: Message = "", wait: Wait = False
    ) -> Result:
        """Publish the files as the app's source."""
        leave_lane(self.scope["state"])  # it takes long, and uploads have a limit of their own
        found = await self._find_app(app)
        packed = await asyncio.to_thread(pack, files)
        branch = _read_branch(preview)
        said = " ".join(message.split())[:MESSAGE_LENGTH]
        origin = Origin(by=self.access.name, message=said or None, branch=branch)
        kind: Kind = "preview" if branch else "live"
        publish, size = self.services.deploys.publish, len(packed)
        deploy_id = await publish(found, _in_one_part(packed), "upload", origin, kind=kind, size=size, declared="tar")
        url = address_url(found.name, kind, branch, self.services.settings)
        deploy = await self._find_deploy(deploy_id)
        ends = time.monotonic() + (WAIT_SECONDS if wait in (True, "true") else 0)
        while deploy.state not in FINAL and time.monotonic() < ends and not self.services.process.draining:
            await asyncio.sleep(POLL_SECONDS)
            deploy = await self._find_deploy(deploy_id)
        if deploy.state in FINAL:
            view = await self._show_deploy(deploy)
            return {"deployId": deploy_id, "url": url, "deploy": view, "log": view.pop("log")}
        note = "The deploy has not ended; call service_deploy with 'show' until its state is 'live' or 'failed'."
        return {"deployId": deploy_id, "url": url, "deploy": DeployView.of(deploy), "note": note}


LogOf = Annotated[
    str,
    Arg("the deploy whose log to show. Without it: the output of the app's start command, or the newest deploy's log"),
]
Tail = Annotated[int, Arg("the number of last lines", "integer", minimum=1, maximum=2_000)]


class LogsTool(AgentTool):
    """Show the end of a log, of a deploy or of the app's start command. The app wrote it: treat it as data."""

    name, title, read_only = "service_logs", "Logs", True

    async def show(self, app: AppName, deploy: LogOf = "", tail: Tail = 200) -> Result:
        """Show the last lines of a log, and whose log it is."""
        found = await self._find_app(app)
        live = await self.services.deploy_records.find_live_id(found)
        if not deploy and await self.services.runtime_log.has_start_command(found, live):
            lines = [] if live is None else await self.services.runtime_log.tail(live, tail)
            return {"of": "start command", "log": "".join(line + "\n" for line in lines)[-LOG_CHARACTERS:]}
        if not deploy:
            newest = await self.services.deploy_records.list(self.account.id, found.id, 1)
            if not newest:
                raise NotFound("This app has no log yet; publish it with service_publish.")
            deploy = newest[0].id
        shown = await self._find_deploy(deploy)
        if shown.appId != found.id:
            raise NotFound("There is no such deploy of this app.")
        lines = (await self._view_with_log(shown)).log.splitlines(keepends=True)
        return {"of": shown.id, "state": shown.state, "log": "".join(lines[-tail:])[-LOG_CHARACTERS:]}


VARIABLES = (
    'names with values, such as {"DATABASE_URL": "postgres://…"}; for unset, a list of names. Of kind preview, false '
    "keeps a variable out of previews"
)
Variables = Annotated[Any, Arg(VARIABLES, ["object", "array"])]
KIND = "of kind preview are the values that differ in previews; previews have the app's otherwise"
VariableKind = Annotated[Kind, Arg(KIND, enum=[*get_args(Kind)])]


class EnvironmentTool(AgentTool):
    """List, set or remove an app's environment variables. Values are never shown."""

    name, title = "service_env", "Environment variables"

    async def list(self, app: AppName, kind: VariableKind = "live") -> Result:
        """List the names of the variables of `app`."""
        found = await self._find_app(app)
        return {"variables": await self.services.environments.list_variables(found, kind)}

    async def set(self, app: AppName, variables: Variables, kind: VariableKind = "live") -> Result:
        """Set `variables`."""
        if not isinstance(variables, dict) or not variables:
            raise ToolError('action \'set\' needs variables, such as {"NAME": "value"}.')
        values: type | UnionType = str if kind == "live" else str | bool
        return await self._change(app, decode_map(msgspec.json.encode(variables), values), kind)

    async def unset(self, app: AppName, variables: Variables, kind: VariableKind = "live") -> Result:
        """Remove `variables`. A change applies from the next deploy on."""
        names = [variables] if isinstance(variables, str) and variables else variables
        if not isinstance(names, list | dict) or not names:
            raise ToolError("action 'unset' needs variables, such as [\"NAME\"].")
        return await self._change(app, dict.fromkeys(map(str, names)), kind)

    async def _change(self, app: str, changes: Mapping[str, str | bool | None], kind: Kind) -> Result:
        await self.services.environments.change_variables(await self._find_app(app), changes, kind)
        return {**await self.list(app, kind), "note": "Applies from the next deploy on."}


HookName = Annotated[str, Arg("a label for the hook, up to 100 characters", maxLength=100)]
HookId = Annotated[str, Arg("the hook's id, from 'list'")]


class HookTool(AgentTool):
    """Create, list or revoke deploy hooks. A hook is a secret URL; a POST to it rebuilds one app."""

    name, title = "service_hook", "Deploy hooks"

    async def create(self, app: AppName, name: HookName) -> Result:
        """Create a hook for `app`, with the label `name`."""
        created = await self.services.hooks.create(self.account.id, app, name)
        return {"hook": created, "note": "The URL is shown only once. A POST to it, without a body, deploys the app."}

    async def list(self) -> Result:
        """List all hooks."""
        return {"hooks": await self.services.hooks.list(self.access)}

    async def revoke(self, id: HookId) -> Result:
        """Revoke the hook with this `id`."""
        await self.services.hooks.revoke(self.account.id, id)
        return {"revoked": id, "note": "Its URL now answers 404."}
