"""The demo apps of `capsule dev`, published to a service that fails each build."""

import asyncio
import socket
from pathlib import Path

from litestar import Litestar, get, put
from litestar.params import FromPath

from capsule_gateway.dev.account import DemoApp
from capsule_gateway.dev.demo import Kind, open_demo
from capsule_gateway.dev.in_process import serve_app
from capsule_gateway.dev.key_file import Keys
from capsule_gateway.dev.layout import Layout

UPLOAD_SECONDS = 0.3


class Service:
    def __init__(self) -> None:
        self.uploading = self.most = 0  # uploads at once: now, and the most of them
        self.published: list[str] = []

        @get("/account/apps")
        async def list_apps() -> list[dict[str, str]]:
            return [{"name": "demo"}, {"name": "hello"}]

        @get("/account/apps/demo/env")
        async def list_environment() -> list[dict[str, str]]:
            return [{"name": "BETTER_AUTH_SECRET"}]

        @get("/account/deploys")
        async def list_deploys() -> list[dict[str, str]]:
            return []

        @get("/account/deploys/dep_1")
        async def show_deploy() -> dict[str, str]:
            return {"id": "dep_1", "state": "failed", "error": "build: none", "log": ""}

        @put("/account/apps/{app:str}/source", status_code=202)
        async def publish(app: FromPath[str]) -> dict[str, str]:
            self.uploading += 1
            self.most = max(self.most, self.uploading)
            await asyncio.sleep(UPLOAD_SECONDS)
            self.uploading -= 1
            self.published.append(app)
            return {"deployId": "dep_1"}

        self.app = Litestar([list_apps, list_environment, list_deploys, show_deploy, publish], openapi_config=None)


def write_page(name: str, kind: Kind, folder: Path) -> None:
    (folder / "index.html").write_text(f"{name} {kind}")


async def test_one_of_the_two_uploads_at_once_is_left_to_the_user(tmp_path: Path) -> None:
    """An account can upload two sources at once, and the user may publish as soon as the screen appears."""
    service, listener = Service(), socket.create_server(("127.0.0.1", 0))
    layout = Layout(listener.getsockname()[1], tmp_path)
    record = DemoApp("app_1", "acc_1", {"kind": "jwks"})
    async with (
        serve_app(service.app, listener),
        open_demo(layout, Keys(api_key="key"), record) as demo,
        asyncio.timeout(30),
    ):
        await demo.publish_both(write_page, is_built=False)
    assert service.published == ["hello", "demo", "demo"]  # the static template takes the place of the one that failed
    assert service.most == 1
