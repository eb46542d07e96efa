"""The status of inference, as a gateway reports it."""

from typing import Any

from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.polling import PATIENCE_SECONDS, wait_until

OPERATIONAL = ("operational", True)
PUBLISHED_WITHIN_SECONDS = 0.2
SOON = {
    "gateway.inference.health.PUBLISH_INTERVAL_SECONDS": PUBLISHED_WITHIN_SECONDS,
    "gateway.inference.health.ANSWER_REFRESH_SECONDS": 0,  # because tests remove what was written
}


async def capabilities(gw: Gateway, key: str = OPERATOR) -> dict[str, Any]:
    response = await gw.http.get("/capabilities", headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200
    return response.json()


async def status(gw: Gateway) -> tuple[str, bool]:
    """Returns the status, and whether inference is available."""
    document = await capabilities(gw)
    return document["managedInferenceStatus"], document["platform"]["features"]["managedInference"]


async def status_becomes(gw: Gateway, expected: tuple[str, bool], timeout: float = PATIENCE_SECONDS) -> None:
    await wait_until(lambda: status(gw), timeout, holds=lambda found: found == expected)


class Usable:
    """The client of a provider with which nothing is wrong."""

    def is_configured(self) -> bool:
        return True

    def read_key(self) -> bool:
        return False

    async def probe(self) -> None:
        raise AssertionError("nothing is wrong with the provider")
