"""Runs moto's S3 as a process."""

import subprocess
import sys
from pathlib import Path
from typing import Self

import httpx

from tests.support.polling import wait_until
from tests.support.redis_servers import free_port

BUCKET = "capsule"
SECRET = "s3-secret-that-nothing-shows"


class S3Server:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.log_file = folder / "s3.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = {
            "GATEWAY_STORAGE_URL": f"s3://{BUCKET}/some/prefix",
            "AWS_ACCESS_KEY_ID": "test-key-id",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    async def start(self) -> Self:
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

        async def answers() -> bool:
            async with httpx.AsyncClient(trust_env=False) as client:
                try:
                    return (await client.put(f"http://127.0.0.1:{self.port}/{BUCKET}")).status_code == 200
                except httpx.TransportError:
                    return False

        await wait_until(answers, 60)
        return self

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
