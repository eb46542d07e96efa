"""Runs the `sites` worker as operators do, as a process."""

import asyncio
import os
import signal
from collections.abc import Mapping

from tests.support.gateway_process import ENCRYPTION_KEY
from tests.support.hosted_apps import Hosting
from tests.support.polling import wait_until
from tests.support.preloaded import Running, launch
from tests.support.redis_servers import free_port


class Sites:
    """`python -m workers sites`, with some constants changed."""

    def __init__(self, hosting: Hosting, redis_url: str, constants: Mapping[str, float] | None = None) -> None:
        # Most tests have no records of their apps in Redis, so their addresses would be removed.
        self.hosting, self.constants = (
            hosting,
            {"workers.hosting.host_agent.TIDY_SECONDS": 3_600.0, **(constants or {})},
        )
        self.log_file = hosting.folder / f"sites-{free_port()}.log"
        self.process: Running | None = None
        self.environment = {
            "PATH": os.environ["PATH"],
            "GATEWAY_REDIS_URL": redis_url,
            "GATEWAY_ENCRYPTION_KEY": ENCRYPTION_KEY,
            "GATEWAY_DATA_DIR": str(hosting.folder),
            "GATEWAY_APPS_LISTEN": f"127.0.0.1:{hosting.port}",
            "GATEWAY_LOG_LEVEL": "debug",
        }

    def start(self) -> None:
        folder = self.hosting.folder
        self.process = launch("workers", ["sites"], self.constants, self.environment, folder, self.log_file)

    async def wait_until_serving(self) -> None:
        await wait_until(lambda: "sites.serving" in self.log, 60)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def stop(self) -> int:
        """Stops it with SIGTERM. Returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, 20)

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
