"""What `make run` says. Colours only for a terminal, and never with NO_COLOR: rich sees to both."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from gateway.dev.layout import Layout

console = Console(highlight=False)


def starting() -> None:
    console.print("[dim]Starting Valkey, the model stand-in, the demo app, the workers and the gateway …[/]")


def running(layout: Layout, api_key: str) -> None:
    dashboard = f"{layout.gateway}/dashboard"
    console.print("\n[bold green]●[/] [bold]Capsule Gateway is running[/]\n")
    _row("Demo page", layout.demo, f"bold cyan link {layout.demo}")
    _row("Hosted app", f"{layout.hello} (tables say https://…, as behind a proxy)")
    _row("Dashboard", dashboard, f"cyan link {dashboard}")
    _row("API key", api_key)
    _row("Operators", f"{layout.gateway}/ops (the token is in {layout.keys})")
    _row("Model", layout.provider_url or "a stand-in on this machine (GATEWAY_PROVIDER_URL names another)")
    _row("Logs", str(layout.log("").parent))
    console.print("\n  [dim]Or stream an answer from another terminal:[/]\n")
    # Alone on its line and never wrapped, so that it can be pasted as it is.
    console.print(Text(layout.curl), soft_wrap=True)
    console.print("\n  [dim]Ctrl-C stops all of it.[/]\n")


def _row(label: str, value: str, style: str = "") -> None:
    # Soft: a folded key or address could not be copied.
    console.print(Text.assemble((f"  {label:<12}", "dim"), (value, style)), soft_wrap=True)


def stopping() -> None:
    console.print("\n[dim]Stopping: running answers may end first. Ctrl-C again stops at once.[/]")


def stopped() -> None:
    console.print("[dim]Stopped.[/]")


def refused(message: str) -> None:
    console.print(Text(message, style="red"), soft_wrap=True)
