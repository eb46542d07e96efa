"""Runs moto's S3 as a process."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
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

    @contextlib.asynccontextmanager
    async def refusing(self, status: str, code: str) -> AsyncIterator[None]:
        """Stops, and answers each request at the port with an error."""
        self.stop()
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>of the store</Message></Error>"
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write((head + body).encode())
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", self.port):
            yield

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
