"""An external deploy engine, played by the test."""

from tests.support.accounts import App


async def report_phases(app: App, deploy_id: str, *phases: str, ok: bool = True, reason: str | None = None) -> None:
    """Reports the end of each phase to the gateway."""
    for phase in phases:
        body = {"phase": phase, "ok": ok, **({"reason": reason} if reason else {})}
        response = await app.gateway.platform("POST", f"deploys/{deploy_id}/phases", body)
        assert response.status_code == 200, response.text
