"""Sends the load: streams at a steady rate. Some callers disconnect early, some want a whole answer, some send no body.

Each line of the standard input is a generation of apps (`Generation`), which replaces the one before. For each request,
a JSON list with the fields of `Answer` is written to the file given as an argument.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from gateway.errors import NotReplicated
from tests.support import prices

# The texts carry a number and words that occur nowhere else, so that the run finds leaked content.
PROMPT = "Zwetschgenroester"
COMPLETION = "Marillenknoedel"
MAX_TOKENS = 64
REQUEST_SECONDS = 45  # at most; a gateway may be stopped for 20 of them
NOT_REPLICATED = "BACKBONE_UNAVAILABLE (too few replicas)"
IDLE_SECONDS = 2  # after which a connection is not used again; a gateway closes it later
MAX_OPEN = 4000  # requests at once


def make_prompt(number: int) -> str:
    return f"{PROMPT} {number:09d}"


def parse_prompt(text: str) -> int:
    return int(text.removeprefix(PROMPT))


def piece_sizes(number: int) -> list[int]:
    """Returns the number of tokens in each piece of the answer to a prompt, at most 60 in total."""
    if is_left(number):
        return [2] * 10
    chance = random.Random(number)
    return [chance.randint(1, 12) for _ in range(chance.randint(1, 5))]


def make_word(number: int, index: int) -> str:
    """Returns a token of the answer to a prompt. All tokens differ, so lost, moved and foreign text is found."""
    return f"{COMPLETION} {number}.{index} "


def is_faithful(number: int, text: str, *, whole: bool) -> bool:
    """Returns whether the text is the answer to the prompt, or if not `whole`, its beginning."""
    expected = "".join(make_word(number, index) for index in range(sum(piece_sizes(number))))
    return text == expected if whole else expected.startswith(text)


def is_left(number: int) -> bool:
    """Returns whether the caller disconnects after the first token, before the provider has answered completely."""
    return number % 12 == 5


def max_cost() -> int:
    """Returns the nano-euro that the gateway reserves for each of these prompts."""
    return prices.max_cost(make_prompt(0), MAX_TOKENS)


class LoadedApp(msgspec.Struct, frozen=True):
    name: str
    account: str
    tokens: list[str]  # one per user
    weight: float


class Generation(msgspec.Struct, frozen=True):
    gateways: list[str]
    apps: list[LoadedApp]


@dataclass
class Answer:
    """The answer to a request as its caller received it. Times are of `time.monotonic`; 0 means never.

    `ending`: `done`, `whole` (not streamed), `error` (an event; its code is in `code`), `refused`, `left` (by the
    caller), `cut` (after the head of the answer), `none` (without an answer).
    """

    number: int
    account: str
    app: str
    user: int
    gateway: int
    body: bool
    start: float
    first: float = 0.0
    end: float = 0.0
    status: int = 0
    code: str = ""
    ending: str = "none"
    tokens: int = 0
    faithful: bool = True  # the text is the right answer's beginning, or all of it if the ending is `done` or `whole`


class Load:
    def __init__(self, rate: float, seed: int, records: Path) -> None:
        self.rate, self._chance = rate, random.Random(seed)
        self._file = records.open("a", buffering=1)
        self._numbers = itertools.count(1)
        self.generation: Generation | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            reading = asyncio.create_task(self._read_generations())
            due = time.monotonic()
            while not reading.done():
                due = max(due + self._chance.expovariate(self.rate), time.monotonic() - 1)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if self.generation is not None and len(self._open) < MAX_OPEN:
                    task = asyncio.create_task(self._send(session, self.generation))
                    self._open.add(task)
                    task.add_done_callback(self._open.discard)
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _read_generations(self) -> None:
        reader = asyncio.StreamReader(2**22)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            self.generation = msgspec.json.decode(line, type=Generation)

    async def _send(self, session: aiohttp.ClientSession, generation: Generation) -> None:
        app = self._chance.choices(generation.apps, [app.weight for app in generation.apps])[0]
        user = self._chance.randrange(len(app.tokens))
        gateway = self._chance.randrange(len(generation.gateways))
        number = next(self._numbers)
        kind = "leave" if is_left(number) else self._chance.choices(("stream", "whole", "bare"), (87, 9, 4))[0]
        answer = Answer(number, app.account, app.name, user, gateway, kind != "bare", time.monotonic())
        body = {"prompt": make_prompt(number), "maxTokens": MAX_TOKENS, "stream": kind != "whole"}
        headers = {"authorization": f"Bearer {app.tokens[user]}", "content-type": "application/json"}
        data = json.dumps(body).encode() if kind != "bare" else b""
        url = f"{generation.gateways[gateway]}/capsule/{app.name}/ai"
        try:
            async with session.post(url, data=data, headers=headers) as response:
                answer.first, answer.status = time.monotonic(), response.status
                answer.ending = "cut"
                await self._read_answer(response, answer, leave=kind == "leave")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            answer.code = answer.code or type(error).__name__
        finally:
            answer.end = time.monotonic()
            self._file.write(json.dumps(astuple(answer), separators=(",", ":")) + "\n")

    async def _read_answer(self, response: aiohttp.ClientResponse, answer: Answer, leave: bool) -> None:
        if response.status != 200:
            error = await response.json(content_type=None)
            answer.code, answer.ending = _find_code(error), "refused"
        elif response.content_type != "text/event-stream":
            text = (await response.json())["text"]
            answer.tokens, answer.ending = 1, "whole"
            answer.faithful = is_faithful(answer.number, text, whole=True)
        else:
            await self._read_stream(response, answer, leave)

    async def _read_stream(self, response: aiohttp.ClientResponse, answer: Answer, leave: bool) -> None:
        event, text = b"", ""
        try:
            async for line in response.content:
                if line.startswith(b"event:"):
                    event = line[6:].strip()
                elif line.startswith(b"data:"):
                    if event == b"done":
                        answer.ending = "done"
                    elif event == b"error":
                        answer.code, answer.ending = _find_code(json.loads(line[5:])), "error"
                    else:
                        answer.tokens += 1
                        text += json.loads(line[5:])["token"]
                        if leave:
                            answer.ending = "left"
                            response.close()
                            return
        finally:
            answer.faithful = is_faithful(answer.number, text, whole=answer.ending == "done")


def _find_code(error: Any) -> str:
    try:
        if error["error"]["message"] == NotReplicated.message:
            return NOT_REPLICATED
        return str(error["error"]["code"])
    except (KeyError, TypeError):
        return "not an error of the service"


if __name__ == "__main__":
    uvloop.run(Load(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])).run())
