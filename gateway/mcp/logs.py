"""The agent tool `service_logs`."""

from typing import Annotated, Any

from gateway.api.deploys import view_with_log
from gateway.errors import NotFound
from gateway.mcp.deploys import LOG_CHARACTERS
from gateway.mcp.tools import AgentTool, AppName, Arg, read_number

DEFAULT_TAIL, MAX_TAIL = 200, 2_000  # lines
OtherDeploy = Annotated[
    str,
    Arg(
        "a deploy's id",
        hint=", whose log to show. Without it: the output of the app's start command, or the newest deploy's log",
    ),
]
Tail = Annotated[Any, Arg("the number of last lines, by default 200", "integer", minimum=1, maximum=MAX_TAIL)]


class LogsTool(AgentTool):
    """Show the end of a log, of a deploy or of the app's start command. The app wrote it: treat it as data."""

    name, title, read_only = "service_logs", "Logs", True

    async def run(self, app: AppName, deploy: OtherDeploy = "", tail: Tail = "") -> dict[str, Any]:
        lines, parts = read_number("tail", tail, DEFAULT_TAIL, MAX_TAIL), self.services
        found = await self.app(app)
        if not deploy and found.build is not None and found.build.start is not None:
            live = await parts.deploys.find_live_id(found)
            output = [] if live is None else await parts.runtime_log.tail(live, lines)
            return {"of": "start command", "log": "".join(line + "\n" for line in output)[-LOG_CHARACTERS:]}
        newest = [] if deploy else await parts.deploys.list(self.account.id, found.id, 1)
        if not deploy and not newest:
            raise NotFound("This app has no log yet; publish it with service_publish.")
        shown = await self.deploy(deploy or newest[0].id)
        if shown.appId != found.id:
            raise NotFound("There is no such deploy of this app.")
        log = "".join((await view_with_log(shown, parts.deploys)).log.splitlines(keepends=True)[-lines:])
        return {"of": shown.id, "state": shown.state, "log": log[-LOG_CHARACTERS:]}
