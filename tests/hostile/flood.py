"""Sends requests with garbage tokens at a constant rate, from a process with an event loop of its own.

    python tests/hostile/flood.py <port> <path> <rate> <seconds> <JSON of the tokens' header> <connections>

Prints a JSON object with the number of answers by status. Each token has its own payload and signature. A connection
that still waits for an answer skips its next request. Answers later than a second after the end are not counted.
"""

import asyncio
import base64
import collections
import json
import secrets
import sys
import time


def encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def make_garbage_token(header: dict[str, str], signature_bytes: int) -> str:
    claims = {"sub": secrets.token_hex(4), "exp": int(time.time()) + 3600}
    parts = [
        json.dumps(header).encode(),
        json.dumps(claims).encode(),
        b"\x01" + secrets.token_bytes(signature_bytes - 1),
    ]
    return ".".join(map(encode_base64, parts))


SIGNATURES = {"RS256": 1024, "ES256": 64, "ES384": 96, "ES512": 132, "EdDSA": 64}


async def send_garbage(
    port: int, path: str, rate: float, seconds: float, header: dict[str, str], connections: int
) -> None:
    answers: collections.Counter[str] = collections.Counter()
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
        due = time.monotonic() + number / rate
        reader = writer = None
        while due < until:
            await asyncio.sleep(max(0, due - time.monotonic()))
            due = max(due + connections / rate, time.monotonic())
            body = b'{"prompt":"x"}'
            token = make_garbage_token(header, SIGNATURES[header["alg"]])
            request = (
                f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {token}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request.encode() + body)
                async with asyncio.timeout(30):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                    await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
                answers[head.split(" ", 2)[1]] += 1
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                answers[type(error).__name__] += 1
                writer = None

    done, _ = await asyncio.wait([asyncio.create_task(client(n)) for n in range(connections)], timeout=seconds + 1)
    for task in done:
        task.result()
    print(json.dumps(answers))


if __name__ == "__main__":
    port, path, rate, seconds, header, connections = sys.argv[1:]
    asyncio.run(send_garbage(int(port), path, float(rate), float(seconds), json.loads(header), int(connections)))
