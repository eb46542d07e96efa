"""Simulates the systems around the service in one process: a model provider, receivers of events, the apps' backends.

It writes one JSON list per line to the file given as an argument:

| record | fields |
| --- | --- |
| `paid` | number of the prompt, input tokens, output tokens, whether the usage was sent, whether a fault cut the answer
|
| `received` | account, event id, seconds of `time.monotonic`, headers of the signature, body |

A line on the standard input switches a fault: `provider cut`, `provider slow 1.5`, `provider ok`, and the same for
`receiver`. `cut` breaks all connections, including new ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from tests.chaos.load import is_left, make_word, parse_prompt, piece_sizes
from tests.fakes.provider import DONE, MODEL, ROLE, chunk

INPUT_TOKENS = 12
RECEIVER_SECONDS = 0.3  # until the receiver answers, so that a killed worker has deliveries in progress
SIGNED = ("webhook-id", "webhook-timestamp", "webhook-signature")


class Link:
    """The network between the service and the provider or the receiver."""

    def __init__(self) -> None:
        self.is_cut, self.delay = False, 0.0
        self.open: set[asyncio.BaseTransport] = set()

    def switch(self, fault: str, *value: str) -> None:
        self.is_cut, self.delay = fault == "cut", float(value[0]) if fault == "slow" else 0.0
        if self.is_cut:
            for transport in list(self.open):
                transport.abort()  # type: ignore[attr-defined]

    async def enter(self, request: web.Request) -> asyncio.BaseTransport:
        """Waits for the delay of the fault. Raises ConnectionResetError if the link is cut."""
        await asyncio.sleep(self.delay)
        transport = request.transport
        if transport is None or self.is_cut:
            if transport is not None:
                transport.abort()
            raise ConnectionResetError
        self.open.add(transport)
        return transport


class Outside:
    def __init__(self, records: Path, keys: dict[str, Any], provider_key: str) -> None:
        self.links = {"provider": Link(), "receiver": Link()}
        self._file = records.open("a", buffering=1)
        self._keys, self._authorization = keys, f"Bearer {provider_key}"

    def build_app(self) -> web.Application:
        app = web.Application(client_max_size=2**20)
        app.router.add_post("/v1/chat/completions", self.complete_chat)
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_post("/events/{account}", self.receive_event)
        app.router.add_get("/keys", self.serve_keys)
        return app

    def record(self, *fields: Any) -> None:
        self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")

    async def list_models(self, request: web.Request) -> web.Response:
        await self.links["provider"].enter(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def serve_keys(self, _: web.Request) -> web.Response:
        return web.json_response(self._keys)

    async def receive_event(self, request: web.Request) -> web.Response:
        link = self.links["receiver"]
        transport = await link.enter(request)
        body = await request.text()
        await asyncio.sleep(RECEIVER_SECONDS)
        signed = {name: request.headers.get(name, "") for name in SIGNED}
        self.record("received", request.match_info["account"], signed["webhook-id"], time.monotonic(), signed, body)
        link.open.discard(transport)
        return web.Response(status=204)

    async def complete_chat(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != self._authorization:
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        link = self.links["provider"]
        body = await request.json()
        number = parse_prompt(body["messages"][-1]["content"])
        transport = await link.enter(request)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        output, whole = 0, False
        try:
            await response.prepare(request)
            await response.write(ROLE)
            for count in piece_sizes(number):
                await asyncio.sleep((0.2 if is_left(number) else 0.05) + link.delay)
                words = [make_word(number, place) for place in range(output, output + count)]
                output += count  # before the write, because tokens that may have arrived are billed
                await response.write(b"".join(map(chunk, words)))
            whole = True
            await response.write(chunk(finish="stop") + chunk(usage=(INPUT_TOKENS, output)) + DONE)
        finally:
            link.open.discard(transport)
            self.record("paid", number, INPUT_TOKENS, output, whole, link.is_cut)
        return response


async def read_switches(outside: Outside) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        name, *fault = line.decode().split()
        outside.links[name].switch(*fault)


async def main(port: int, records: Path, keys: Path) -> None:
    outside = Outside(records, json.loads(keys.read_text()), os.environ["PROVIDER_KEY"])
    # A canceled handler is how the provider learns that the gateway has left.
    runner = web.AppRunner(outside.build_app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await read_switches(outside)  # until the run ends


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
