"""Prints the messages of `capsule dev`. rich omits colors outside a terminal and with NO_COLOR."""

from rich.console import Console
from rich.text import Text

from capsule_gateway.dev.identity import OPERATOR, OWNER
from capsule_gateway.dev.layout import DRAIN_SECONDS, Layout

console = Console(highlight=False)


def print_starting() -> None:
    console.print("[dim]Starting Valkey, the model stand-in, the workers and the gateway …[/]")


def print_running(layout: Layout, api_key: str, fault: tuple[str, str], *, is_built: bool = False) -> None:
    """Prints the addresses. `fault` is the reason why this machine builds nothing, and the remedy, or empty strings."""
    dashboard, (reason, remedy) = f"{layout.gateway}/dashboard", fault
    console.print("\n[bold green]●[/] [bold]Capsule Gateway is running[/]\n")
    if layout.own_app:
        _print_row("Your app", layout.address, f"bold cyan link {layout.address}")
        _print_row("", f"{layout.own_app.command} (its output follows)")
    elif not reason:
        _print_row("Demo page", layout.address, f"bold cyan link {layout.address}")
        if not is_built:
            _print_row("", "is being built, which takes a minute the first time. A line below says when it answers.")
        _print_row("Static page", layout.hello, f"cyan link {layout.hello}")
    if reason:
        _print_row("Builds" if layout.own_app else "Demo page", f"unavailable: {reason}", "yellow")
    if remedy:
        _print_row("", f"To fix it: {remedy}, then start again.")
        _print_row("", "Or use containers: docker compose up (see README.md).")
        _print_row("", "Or, for your own code only, go without a sandbox: make run ARGS=--trust-builds")
    _print_row("Dashboard", dashboard, f"cyan link {dashboard}")
    _print_row("", f"Sign in as {OWNER}, or with the API key")
    _print_row("API key", api_key)
    _print_row("Operators", f"{layout.gateway}/ops (sign in as {OPERATOR}, or with operator_token from {layout.keys})")
    _print_row("Model", layout.provider_url or "a stand-in on this machine (for a real one, set GATEWAY_PROVIDER_URL)")
    if layout.https:
        _print_row("Certificate", f"{layout.root_certificate} (let your browser trust it)")
    _print_row("Logs", str(layout.logs))
    if layout.data_dir != layout.folder:
        _print_row("Builds", f"{layout.data_dir} (builds run as users that can't reach {layout.folder})")
    if layout.trust_builds:
        console.print()
        warning = "WITHOUT A SANDBOX: builds and apps can access your files and your network."
        console.print(Text(f"  {warning} Publish only your own code.", style="bold red"), soft_wrap=True)
    if not layout.own_app:
        console.print("\n  [dim]To stream an answer from another terminal:[/]\n")
        # On its own line and never wrapped, so that it can be copied.
        console.print(Text(layout.curl), soft_wrap=True)
    console.print("\n  [dim]Press Ctrl-C to stop.[/]\n")


def print_answer(layout: Layout, seconds: float) -> None:
    console.print(
        f"[bold green]●[/] {layout.app} answers at [bold cyan]{layout.address}[/] (after {seconds:.0f} s)",
        soft_wrap=True,
    )


def print_demo_fault(kind: str, reason: str) -> None:
    follows = "The static template takes its place." if kind == "full" else ""
    print_error(f"The template could not be served: {reason}. {follows}".rstrip())


def _print_row(label: str, value: str, style: str = "") -> None:
    # Never folded, so that keys and addresses can be copied.
    console.print(Text.assemble((f"  {label:<12}", "dim"), (value, style)), soft_wrap=True)


def print_stopping() -> None:
    console.print(
        f"\n[dim]Stopping. Running answers have {DRAIN_SECONDS} s to end; press Ctrl-C again to stop at once.[/]"
    )


def print_stopped() -> None:
    console.print("[dim]Stopped.[/]")


def print_error(message: str) -> None:
    console.print(Text(message, style="red"), soft_wrap=True)
