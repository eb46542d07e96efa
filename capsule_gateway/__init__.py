"""The only package in the wheel; it contains the service.

The service's code imports `gateway` and `workers`. Other distributions may have packages with these names, so the wheel
installs them inside this package, and a process of the service adds this folder to its own path. In a source tree, the
two are beside this package and already on the path. docs/architecture.md gives the reasons.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from litestar.types import ASGIApp

__all__ = ["add_to_path", "create_app", "main"]


def main() -> None:
    """Runs the command line with the arguments of this process, and exits."""
    add_to_path()
    from capsule_gateway.cli.main import main as run

    run()


def create_app() -> ASGIApp:
    """Creates the application for any ASGI server: `uvicorn --factory capsule_gateway:create_app`."""
    add_to_path()
    from gateway.app import create_app as build

    return build()


def add_to_path() -> None:
    """Adds this folder at the front of the path, so that it takes precedence over packages with the same names."""
    here = Path(__file__).parent
    if (here / "gateway").is_dir() and str(here) not in sys.path:
        sys.path.insert(0, str(here))
