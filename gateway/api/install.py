"""Serves the command line: the script that installs it, and the wheel that the script passes to pip."""

import asyncio
import re
import shlex
from functools import cache
from typing import Any

from litestar import Request, Response, route
from litestar.datastructures import State
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from gateway.api.assets import FOREVER, NO_CACHE, PAGES, Asset, make_asset, respond
from gateway.api.client_wheel import client_wheel
from gateway.api.pages import READ
from gateway.services import Injected
from gateway.settings import Settings

SCRIPT = PAGES / "install.sh"


@cache
def make_script(base_url: str) -> Asset:
    """Returns the script, which installs the command line of this version from this address."""
    addresses = {"__URL__": base_url, "__WHEEL__": f"{base_url}/cli/{client_wheel().name}"}
    script = re.sub("__URL__|__WHEEL__", lambda found: shlex.quote(addresses[found[0]]), SCRIPT.read_text())
    return make_asset(script.encode(), "text/plain", NO_CACHE)


@cache
def make_wheel() -> Asset:
    return make_asset(client_wheel().content, "application/zip", FOREVER)


@route("/install.sh", http_method=READ, include_in_schema=False)
async def install_script(request: Request[Any, Any, State], settings: Injected[Settings]) -> Response[bytes]:
    """The script. A thread packs the wheel: streams must not wait for it."""
    return respond(request, await asyncio.to_thread(make_script, settings.base_url))


@route("/cli/{file:str}", http_method=READ, include_in_schema=False)
async def wheel(request: Request[Any, Any, State], file: FromPath[str]) -> Response[bytes]:
    """The wheel, under its name. Raises NotFoundException for that of another version."""
    asset = await asyncio.to_thread(make_wheel)
    if file != client_wheel().name:
        raise NotFoundException
    return respond(request, asset)


ROUTES = [install_script, wheel]
