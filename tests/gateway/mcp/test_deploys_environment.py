"""The agent tool `service_env`, with the SDK's own client."""

import secrets

import pytest

from tests.support.accounts import App
from tests.support.agents import Connect, call

TOOL = "service_env"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_set_list_and_unset_without_values(connect: Connect, hosted: App) -> None:
    value = secrets.token_hex(8)
    async with connect(hosted.gateway.address, hosted.account.key) as client:

        async def names(action: str, **more: object) -> list[str]:
            answered = await call(client, TOOL, action=action, app=hosted.name, **more)
            assert value not in str(answered)
            return [variable["name"] for variable in answered["variables"]]

        assert await names("set", variables={"A": value, "B": value, "C": value}) == ["A", "B", "C"]
        assert await names("set", variables={"B": "other"}) == ["A", "B", "C"]
        assert await names("unset", variables=["A"]) == ["B", "C"]
        assert await names("unset", variables={"B": None}) == ["C"]
        assert await names("list") == ["C"]
        assert await names("unset", variables="C") == []


async def test_values_for_previews(connect: Connect, hosted: App) -> None:
    async with connect(hosted.gateway.address, hosted.account.key) as client:

        async def previews(action: str, **more: object) -> dict[str, str]:
            answered = await call(client, TOOL, action=action, app=hosted.name, kind="preview", **more)
            return {variable["name"]: variable["inPreviews"] for variable in answered["variables"]}

        await call(client, TOOL, action="set", app=hosted.name, variables={"A": "1", "B": "2", "C": "3"}, kind="")
        assert await previews("list") == {"A": "same", "B": "same", "C": "same"}
        assert await previews("set", variables={"A": "4", "B": False}) == {"A": "other", "B": "none", "C": "same"}
        assert await previews("unset", variables=["A"]) == {"A": "same", "B": "none", "C": "same"}
