"""The schema and the messages that a tool's class makes."""

from collections import defaultdict
from typing import Annotated, Any, cast

import msgspec
import pytest
from mcp.server.mcpserver.exceptions import ToolError
from msgspec import UNSET, Meta, UnsetType

from gateway.accounts.access import Access, Call
from gateway.accounts.records import Account
from gateway.mcp import tools
from gateway.mcp.tools import ACCESS, AgentTool, AppName, Arg, Result
from gateway.services import Services

SERVICES = cast(Services, None)  # these tools use none
ACCOUNT = Account(id="acc_1", name="One", plan="free", createdAt="")


@pytest.fixture(autouse=True)
def permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tools have no rows in the table of calls."""
    monkeypatch.setattr(tools, "TOOL_CALLS", defaultdict[str, list[Call]](list))


class Paint(msgspec.Struct, forbid_unknown_fields=True):
    """Null removes it."""

    color: Annotated[str | UnsetType | None, Meta(description="the color")] = UNSET
    size: Annotated[int | UnsetType | None, Meta(description="the size")] = UNSET


class PaintTool(AgentTool):
    """Paints."""

    name, title = "paint", "Paint"

    async def show(self, app: AppName, tail: Annotated[int, Arg("lines", "integer", maximum=20)] = 5) -> Result:
        """Show the paint."""
        return {"app": app, "tail": tail}

    async def set(self, app: AppName, change: Paint) -> Result:
        """Change the paint."""
        return {"app": app, "paint": change}


class LookTool(AgentTool):
    """Looks."""

    name, title, read_only = "look", "Look", True

    async def look(
        self, app: AppName, kind: Annotated[str, Arg("the kind", enum=["", "big", "small"])] = "big"
    ) -> Result:
        """Look."""
        return {"app": app, "kind": kind}


async def answer(tool: type[AgentTool], **given: Any) -> Result:
    names = {name for action in tool.actions.values() for name in action.args}
    return await tool(SERVICES, {ACCESS: Access(ACCOUNT)}).answer({**dict.fromkeys({"action", *names}, ""), **given})


def test_the_schema_names_the_actions_that_take_an_argument() -> None:
    schema = PaintTool.make(SERVICES).parameters
    described = {name: each["description"] for name, each in schema["properties"].items()}
    assert described == {
        "action": "show: show the paint. set: change the paint.",
        "app": "The app's name.",
        "tail": "For show: lines.",
        "color": "For set: the color. Null removes it.",
        "size": "For set: the size. Null removes it.",
    }
    assert schema["properties"]["size"]["type"] == ["integer", "null"]
    assert schema["required"] == ["action"]


def test_a_tool_with_one_action_has_no_argument_for_it() -> None:
    tool = LookTool.make(SERVICES)
    assert tool.parameters["required"] == ["app"]
    assert tool.parameters["properties"].keys() == {"app", "kind"}
    assert tool.parameters["properties"]["kind"]["default"] == "big"
    assert tool.annotations is not None
    assert tool.annotations.read_only_hint is True


async def test_empty_values_are_not_given_and_null_is_a_value_of_some() -> None:
    assert await answer(PaintTool, action="show", app=" shop ", tail=None) == {"app": "shop", "tail": 5}
    assert await answer(PaintTool, action="show", app="shop", tail="07") == {"app": "shop", "tail": 7}
    painted = await answer(PaintTool, action="set", app="shop", color=None, size=0)
    assert painted == {"app": "shop", "paint": {"color": None, "size": 0}}
    assert await answer(PaintTool, action="set", app="shop", size=0) == {"app": "shop", "paint": {"size": 0}}
    assert await answer(LookTool, app="shop") == {"app": "shop", "kind": "big"}


@pytest.mark.parametrize(
    ("tool", "given", "message"),
    [
        (PaintTool, {}, "action must be 'show' (with app) or 'set' (with app and any of color, size)."),
        (PaintTool, {"action": ["set"]}, "action must be"),
        (PaintTool, {"action": "set", "app": "shop"}, "action 'set' needs at least one of color, size."),
        (PaintTool, {"action": "set", "app": "shop", "size": "1"}, "size: must be a whole number or null, not text."),
        (PaintTool, {"action": "set", "app": 7, "size": 1}, "action 'set' needs app: the app's name."),
        (PaintTool, {"action": "show", "app": "shop", "size": 0}, "action 'show' does not take size; leave it out."),
        (PaintTool, {"action": "show", "app": "shop", "tail": True}, "tail must be a number from 1 to 20."),
        (PaintTool, {"action": "show", "app": "shop", "tail": "0" * 5000}, "tail must be a number from 1 to 20."),
        (LookTool, {}, "app is needed: the app's name."),
        (LookTool, {"app": "shop", "kind": "huge"}, "kind must be one of big, small."),
    ],
)
async def test_messages_say_how_to_correct_the_call(tool: type[AgentTool], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError) as raised:
        await answer(tool, **given)
    assert str(raised.value).startswith(message)
