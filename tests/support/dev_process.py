"""Runs `capsule dev` as a process, with its own folder and ports."""

import asyncio
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from tests.support.preloaded import python
from tests.support.user_namespace import enter_user_namespace

RATE = 4  # requests per user and minute, so that a test reaches the limit
PACE = {"capsule_gateway.dev.model.TOKEN_SECONDS": 0.02}  # an answer takes two seconds, so tests can interrupt it
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Run:
    """One run; `said` is its output so far."""

    port: int
    folder: Path
    process: asyncio.subprocess.Process
    said: str = ""

    @property
    def demo(self) -> str:
        return f"http://demo.apps.localhost:{self.port + 1}"

    @property
    def hosted(self) -> str:
        """The address at which the workers serve all apps, by their host names."""
        return f"http://127.0.0.1:{self.port + 1}"

    @property
    def api_key(self) -> str:
        return re.findall(r"csk_\S+", self.said)[0]

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def curl(self) -> str:
        [line] = [line for line in self.said.splitlines() if line.startswith("curl ")]
        return line

    async def read(self, until: str = "", seconds: float = 60) -> str:
        """Reads the output up to the line that contains `until`, or to its end."""
        assert self.process.stdout
        async with asyncio.timeout(seconds):
            while line := (await self.process.stdout.readline()).decode():
                self.said += line
                if until and until in line:
                    break
        return self.said

    async def stop(self, number: int = signal.SIGINT) -> int:
        if not self.ended:
            self.process.send_signal(number)
        await self.read()
        code = await asyncio.wait_for(self.process.wait(), 30)
        # asyncio reports 255 for a child that is already gone; the last line of the output is reliable.
        return 0 if code == 255 and self.said.endswith("Stopped.\n") else code


async def start(port: int, folder: Path, *arguments: str, confined: bool = False, **settings: str) -> Run:
    """Starts a run. A `confined` one is in a container that allows no sandbox."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("GATEWAY_", "CAPSULE_"))},
        "COLUMNS": "60",
        "CAPSULE_PORT": str(port),
        "GATEWAY_DATA_DIR": str(folder),
        "GATEWAY_RATE_LIMITS": f"user={RATE}",
        **settings,
    }
    command = [*python("capsule_gateway", PACE), "dev", *arguments]
    process = await asyncio.create_subprocess_exec(
        *(enter_user_namespace(*command) if confined else command),
        cwd=REPOSITORY,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    return Run(port, folder, process)
