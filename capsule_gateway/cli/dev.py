"""`capsule dev`: runs the whole service on this machine. `make run` is the same."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capsule_gateway.cli.arguments import MANIFEST, NumberType
from capsule_gateway.cli.folders import read_manifest, write_template
from capsule_gateway.cli.service import WrongUsage

if TYPE_CHECKING:
    from capsule_gateway.dev.layout import OwnApp


class _ReadsEnvFile(click.Command):
    """Reads `.env` before the options, because the gateway reads it too and both must use the same provider."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        from dotenv import load_dotenv

        load_dotenv(".env")
        return super().make_context(*args, **options)


@click.command(cls=_ReadsEnvFile)
@click.argument(
    "folder", metavar="[DIR]", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--port",
    envvar="CAPSULE_PORT",
    default=8000,
    type=NumberType(1024, 65531),
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
def dev(folder: Path | None, port: int, data_dir: Path, provider_url: str | None, trust_builds: bool) -> None:
    """Run the whole service on this machine, with a demo app.

    With DIR, run the app in this folder in the place of the demo app: the command of [dev] in its capsule.toml, outside
    the sandbox. With GATEWAY_ACME=internal, everything is served with HTTPS.
    """
    from capsule_gateway.dev.layout import Layout
    from capsule_gateway.dev.run import run_until_signal

    own_app = _read_own_app(folder) if folder else None
    https = os.environ.get("GATEWAY_ACME", "").lower() == "internal"
    layout = Layout(port, data_dir.resolve(), provider_url, trust_builds, own_app, https)
    sys.exit(asyncio.run(run_until_signal(layout, write_template)))


def _read_own_app(folder: Path) -> OwnApp:
    """Reads the manifest of the folder. Raises WrongUsage."""
    import msgspec

    from capsule_gateway.dev.layout import DEMO, OwnApp

    manifest = read_manifest(folder)
    if manifest.dev is None:
        raise WrongUsage(f'{folder / MANIFEST} has no [dev] table; add one with the line: command = "npm run dev"')
    auth = None if manifest.auth is None else msgspec.to_builtins(manifest.auth)
    return OwnApp(manifest.name or DEMO, folder.resolve(), manifest.dev.command, auth)
