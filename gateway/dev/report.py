"""What `make run` says. Colours only for a terminal, and never with NO_COLOR: rich sees to both."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .layout import Layout

console = Console(highlight=False)


def starting() -> None:
    console.print("[dim]Starting Valkey, the model stand-in, the demo app, the workers and the gateway …[/]")


def running(layout: Layout, api_key: str) -> None:
    dashboard = f"{layout.gateway}/dashboard"
    model = layout.provider_url or "a stand-in on this machine (GATEWAY_PROVIDER_URL, _KEY: another)"
    rows = Table.grid(padding=(0, 3))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("Demo page", Text(layout.demo, style=f"bold cyan link {layout.demo}"))
    rows.add_row("Dashboard", Text(dashboard, style=f"cyan link {dashboard}"))
    rows.add_row("API key", Text(api_key))
    rows.add_row("Model", Text(model))
    rows.add_row("Logs", Text(str(layout.log("").parent)))
    console.print("\n[bold green]●[/] [bold]Capsule Gateway is running[/]\n")
    console.print(Padding(rows, (0, 0, 0, 2), expand=False))
    console.print("\n  [dim]Or stream an answer from another terminal:[/]\n")
    # Alone on its line and never wrapped, so that it can be pasted as it is.
    console.print(Text(layout.curl), soft_wrap=True)
    console.print("\n  [dim]Ctrl-C stops all of it.[/]\n")


def stopping() -> None:
    console.print("\n[dim]Stopping: running answers may end first. Ctrl-C again stops at once.[/]")


def stopped() -> None:
    console.print("[dim]Stopped.[/]")


def refused(message: str) -> None:
    console.print(Text(message, style="red"), soft_wrap=True)
