"""Calls the app of `capsule dev` at its address, as its visitors do."""

import ssl

import httpx

from capsule_gateway.dev.layout import Layout
from gateway.loops import until

POLL_SECONDS = 0.2


def open_app(layout: Layout) -> httpx.AsyncClient:
    """Returns a client that finds the app even where the resolver does not know names under localhost."""

    async def name_host(request: httpx.Request) -> None:
        request.extensions["sni_hostname"] = layout.host

    return httpx.AsyncClient(
        base_url=f"{layout.scheme}://127.0.0.1:{layout.apps_port}",
        headers={"Host": f"{layout.host}:{layout.apps_port}", "Origin": layout.address},
        event_hooks={"request": [name_host]},
        verify=ssl.create_default_context(cafile=layout.root_certificate) if layout.https else False,
        trust_env=False,
        timeout=10,
    )


async def wait_for_answer(app: httpx.AsyncClient) -> None:
    """Waits until the app answers, also with an error of its own. Caddy answers 404 or 502 in its place."""

    async def answers() -> bool:
        try:
            return (await app.get("/")).status_code not in (404, 502, 503)
        except httpx.TransportError:
            return False

    await until(answers, POLL_SECONDS)
