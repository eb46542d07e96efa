"""`capsule dev`: runs the whole service on this machine. `make run` is the same."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click
from dotenv import load_dotenv


class _ReadsEnvFile(click.Command):
    """Reads `.env` before the options, because the gateway reads it too and both must use the same provider."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        load_dotenv(".env")
        return super().make_context(*args, **options)


@click.command(cls=_ReadsEnvFile)
@click.option(
    "--port",
    envvar="CAPSULE_PORT",
    default=8000,
    type=click.IntRange(1024, 65531),
    show_default=True,
    show_envvar=True,
    help="Port of the gateway. The next four ports are used too.",
)
@click.option(
    "--data-dir",
    envvar="GATEWAY_DATA_DIR",
    default=".capsule",
    type=click.Path(path_type=Path),
    show_default=True,
    show_envvar=True,
    help="Folder for data, keys and logs.",
)
@click.option(
    "--provider-url",
    envvar="GATEWAY_PROVIDER_URL",
    show_envvar=True,
    help="URL of a model provider that replaces the stand-in. Also set GATEWAY_PROVIDER_KEY.",
)
@click.option(
    "--trust-builds",
    is_flag=True,
    envvar="GATEWAY_TRUST_BUILDS",
    help="Run builds and apps without a sandbox if this machine cannot create one. For your own code only.",
)
def dev(port: int, data_dir: Path, provider_url: str | None, trust_builds: bool) -> None:
    """Run the whole service on this machine, with a demo app."""
    from gateway.dev.layout import Layout
    from gateway.dev.run import run_until_signal

    layout = Layout(port, data_dir.resolve(), provider_url, trust_builds)
    sys.exit(asyncio.run(run_until_signal(layout)))
