"""`capsule serve` and `capsule worker`: run the processes of the service, or check that they run.

The checks are for containers: they take a few seconds at most, print one line, and exit with 0 or 1. The workers are
imported late, so that other commands do not load them.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from typing import TYPE_CHECKING, Any

import click

from capsule_gateway.cli.arguments import NumberType
from capsule_gateway.cli.service import ServiceRefusal
from capsule_gateway.cli.show import print_doubts
from gateway.settings import BadSettings, Settings, find_doubts, find_unread, load

if TYPE_CHECKING:
    import httpx

READY_SECONDS = 3.0  # timeout of a check; the gateway itself waits two seconds for Redis
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  addresses of a server that listens on all interfaces
WORKERS = ("webhooks", "deploys", "sites", "monitors")
CANNOT_LISTEN = {
    errno.EADDRINUSE: "port {port} of {host} is in use: stop the process that listens there, or choose another --port",
    errno.EACCES: "this user may not listen on port {port}: choose a --port above 1023",
}


class UnusableData(ServiceRefusal):
    """This version cannot use the data, as `gateway/operations/layout.py` explains."""

    exit_code = 78


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=NumberType(1, 65535), help="Port to listen on.")
@click.option("--workers", default=1, show_default=True, type=NumberType(1, 64), help="Number of processes.")
@click.option("--check", is_flag=True, help="Check that the gateway on this host and port is ready, and exit.")
def serve(host: str, port: int, workers: int, check: bool) -> None:
    """Run the gateway."""
    if check:
        return _check_ready(host, port)
    settings = load_settings()
    print_doubts(find_doubts(settings))
    check_port(host, port)
    from gateway.operations.layout import LayoutFault
    from gateway.server.serve import serve as run

    try:
        sys.exit(run(host, port, workers, settings))
    except LayoutFault as fault:
        raise UnusableData(str(fault)) from None


def check_port(host: str, port: int) -> None:
    """Raises ServiceRefusal if the gateway cannot listen there. The server itself would fail only after its start."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        addresses = []
    usable = [_can_bind(family, address, port) for family, _, _, _, address in addresses]
    if not any(usable):
        raise ServiceRefusal(f"{host} is not an address of this machine: choose another --host")


def _can_bind(family: int, address: Any, port: int) -> bool:
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno in CANNOT_LISTEN:
                raise ServiceRefusal(CANNOT_LISTEN[error.errno].format(host=address[0], port=port)) from None
            return False  # such as ::1, for `localhost`, on a machine without IPv6
    return True


def _check_ready(host: str, port: int) -> None:
    import httpx

    url = httpx.URL(scheme="http", host=LOOPBACK.get(host, host), port=port, path="/ready")
    try:
        answer = httpx.get(url, timeout=READY_SECONDS, trust_env=False)
    except httpx.HTTPError as error:
        raise ServiceRefusal(f"{url} does not answer: {str(error) or type(error).__name__}") from None
    if not answer.is_success:
        raise ServiceRefusal(f"{url} answered {answer.status_code}{_error_message(answer)}")
    click.echo(f"{url} answered {answer.status_code}")


def _error_message(answer: httpx.Response) -> str:
    try:
        return f": {answer.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return ""


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(WORKERS))
@click.option("--check", is_flag=True, help="Check that these workers run on this host, and exit.")
@click.option("--restart", is_flag=True, help="Start the workers again when they fail; for containers.")
def worker(names: tuple[str, ...], check: bool, restart: bool) -> None:
    """Run background workers.

    Without a NAME, all of them run.

    \b
    webhooks   delivers events
    deploys    builds apps; without GATEWAY_STORAGE_URL it serves them too
    sites      serves the hosted apps, on one host or in a Kubernetes cluster
    monitors   probes apps, checks certificates, ends abandoned reservations
    """
    chosen = list(names or WORKERS)
    if check:
        return _check_workers(chosen)
    from workers.__main__ import main

    sys.exit(main(chosen, restart=restart))


def _check_workers(names: list[str]) -> None:
    from workers.check import combine_names, find_fault

    settings = load_settings()
    names = combine_names(settings, names)
    if fault := asyncio.run(find_fault(settings, names)):
        raise ServiceRefusal(fault)
    click.echo(f"running: {', '.join(names)}")


def log_to_stderr() -> None:
    """Writes the log to stderr until it is configured."""
    import structlog

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def load_settings() -> Settings:
    """Reads the settings and prints a line for each variable that nothing reads, or prints what is wrong and exits."""
    log_to_stderr()
    try:
        print_doubts(find_unread())
        return load()
    except BadSettings as error:
        # The only message of several lines: each line names a variable.
        click.echo(f"capsule: the settings are invalid:\n{error}", err=True)
        sys.exit(1)
