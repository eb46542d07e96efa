"""Runs the command line tool with arguments and environment, and returns its exit code and output."""

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from click.testing import CliRunner

from capsule_gateway.cli.main import main


class Run(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """The only line of the output."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1, self.out
        return self.out.strip()

    @property
    def rows(self) -> list[list[str]]:
        """The cells of a table, which are separated by at least two spaces."""
        assert self.code == 0, self.err
        return [re.split("  +", line.strip()) for line in self.out.splitlines()]


def invoke(arguments: Sequence[str], environment: Mapping[str, str | None], given: str = "") -> Run:
    """Runs the tool in this process. None unsets a variable. Raises what the tool does not turn into an exit code.

    The service's settings, and credentials of a storage, come from `environment` alone.
    """
    inherited = {name: None for name in os.environ if name.startswith(("GATEWAY_", "AWS_"))}
    logging = structlog.get_config()
    try:
        result = CliRunner().invoke(main, arguments, input=given, env=inherited | {**environment}, prog_name="capsule")
    finally:
        structlog.configure(**logging)  # to the runner's output, which is gone
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Run(result.exit_code, result.stdout, result.stderr)


class Tool:
    def __init__(self, url: str, key: str, home: Path) -> None:
        self.home = home
        self.environment: dict[str, str | None] = {
            "CAPSULE_URL": url or None,
            "CAPSULE_API_KEY": key or None,
            "XDG_CONFIG_HOME": str(home),
            "SSL_CERT_DIR": str(home),  # no test needs the certificates, which take 20 ms to read
            "NO_COLOR": None,
            "COLUMNS": None,
        }

    async def __call__(self, *arguments: str, given: str = "", **environment: str | None) -> Run:
        """Runs the tool, which must never print a traceback. An error is one line."""
        run = await self.run(*arguments, given=given, **environment)
        if run.code:
            assert run.err.splitlines()[-1].startswith("capsule: "), run.err
        return run

    async def run(self, *arguments: str, given: str = "", **environment: str | None) -> Run:
        """Runs the tool, which may print anything."""
        return await asyncio.to_thread(invoke, arguments, {**self.environment, **environment}, given)

    async def refused(self, *arguments: str, code: int = 1, **options: Any) -> str:
        """Runs the tool, which must fail. Returns the error without the tool's name."""
        run = await self(*arguments, **options)
        assert run.code == code, run
        assert not run.out, run.out
        assert run.err.count("\n") == 1, run.err
        return run.err.removeprefix("capsule: ").strip()


def run_process(tool: Tool, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the tool in a separate process with pipes for its output."""
    process = start_process(tool, *arguments)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_process(tool: Tool, *arguments: str) -> subprocess.Popen[str]:
    """Starts the tool in a separate process with pipes for its output."""
    command = [sys.executable, "-m", "capsule_gateway", *arguments]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, env=_environment(tool), stdin=nothing, stdout=pipe, stderr=pipe, text=True)


def run_in_terminal(tool: Tool, *arguments: str, columns: int = 80, given: str = "", **environment: str) -> str:
    """Runs the tool in a terminal and types `given`. Returns both streams with their escape sequences."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "capsule_gateway", *arguments],
        env={**_environment(tool), "TERM": "xterm", "COLUMNS": str(columns), **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.write(ours, given.encode())
    seen = b""
    try:
        while part := os.read(ours, 65536):
            seen += part
    except OSError:  # Linux raises it when the other side is closed
        pass
    finally:
        os.close(ours)
        process.wait(20)
    return seen.decode()


def _environment(tool: Tool) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], **{name: value for name, value in tool.environment.items() if value}}
