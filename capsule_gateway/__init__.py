"""What the wheel installs: this one package, with the service in folders of it.

The service's code imports `gateway` and `workers`. Other distributions may have packages of these names, so the wheel
puts them in here instead of beside it, and a process of the service adds this folder to its own path. In a source
tree the two stand beside this package and are on the path already. docs/decisions.md gives the reasons.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from litestar.types import ASGIApp

__all__ = ["create_app", "main"]


def main() -> None:
    """Runs the command line with the arguments of this process, and exits."""
    _add_to_path()
    from gateway.cli.main import main as run

    run()


def create_app() -> ASGIApp:
    """For any ASGI server that has a process of its own: `uvicorn --factory capsule_gateway:create_app`."""
    _add_to_path()
    from gateway.app import create_app as build

    return build()


def _add_to_path() -> None:
    """At its front, so that packages of the same names elsewhere are not imported instead."""
    here = Path(__file__).parent
    if (here / "gateway").is_dir() and str(here) not in sys.path:
        sys.path.insert(0, str(here))
