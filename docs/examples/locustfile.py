"""Simulate users who stream answers. docs/load-testing.md explains how to run it and how to read its results.

CAPSULE_APP=notes CAPSULE_SESSION_URL=https://… locust -f locustfile.py --host https://api.example.com
"""

import json
import os
import time

from locust import HttpUser, between, events, task

PATH = f"/capsule/{os.environ['CAPSULE_APP']}/ai"
SESSION_URL = os.environ["CAPSULE_SESSION_URL"]
BODY = {"prompt": os.environ.get("CAPSULE_PROMPT", "What is a capsule?"), "stream": True, "maxTokens": 200}
TOKEN_SECONDS = 300  # the lifetime of a user's token, with a margin

started = time.monotonic()
tokens = 0


class Reader(HttpUser):
    """A simulated user, who signs in, reads an answer to its end, and asks again."""

    wait_time = between(1, 3)

    def on_start(self) -> None:
        self.sign_in()

    def sign_in(self) -> None:
        """Sign in. Change this to what your app's backend expects; each simulated user needs a separate token."""
        response = self.client.post(SESSION_URL, headers={"Accept": "text/plain"}, name="sign in")
        response.raise_for_status()
        self.headers = {"Authorization": f"Bearer {response.text}"}
        self.sign_in_at = time.monotonic() + TOKEN_SECONDS

    @task
    def ask(self) -> None:
        if time.monotonic() > self.sign_in_at:
            self.sign_in()
        wait = 0.0
        asked = time.perf_counter()
        with self.client.post(
            PATH, json=BODY, headers=self.headers, stream=True, catch_response=True, name="answer", timeout=310
        ) as response:
            if response.status_code == 200:
                arrivals, end = read(response)
                response.request_meta["response_time"] = milliseconds(time.perf_counter() - asked)
                report(asked, arrivals)
                if end != "done":
                    response.failure(end)
            else:
                # A separate row: refusals are fast and would make the answers look fast, too.
                response.request_meta["name"] = "refused"
                wait = float(response.headers.get("Retry-After", 0))
                response.failure(f"{response.status_code} {error_code(response.text)}")
        time.sleep(min(wait, 60))


def read(response) -> tuple[list[float], str]:
    """Return the arrival time of each token and how the stream ended: `done`, an error's code, or `cut off`."""
    arrivals, event = [], ""
    for line in response.iter_lines():
        if line.startswith(b"event: "):
            event = line[7:].decode()
        elif line.startswith(b"data: ") and event == "error":
            return arrivals, error_code(line[6:])
        elif line.startswith(b"data: ") and not event:
            arrivals.append(time.perf_counter())
    return arrivals, event or "cut off"


def report(asked: float, arrivals: list[float]) -> None:
    global tokens
    tokens += len(arrivals)
    if arrivals:
        fire("first token", arrivals[0] - asked)
    if len(arrivals) > 1:
        fire("time per token", (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1))


def fire(name: str, seconds: float) -> None:
    """Add a row to Locust's table."""
    row = {"request_type": "SSE", "name": name, "response_time": milliseconds(seconds), "response_length": 0}
    events.request.fire(**row, exception=None, context={})


def milliseconds(seconds: float) -> float:
    return seconds * 1000


def error_code(body: str | bytes) -> str:
    try:
        return json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return "without a code"  # for example from a proxy


@events.test_start.add_listener
def start(**_) -> None:
    global started, tokens
    started, tokens = time.monotonic(), 0


@events.test_stop.add_listener
def stop(**_) -> None:
    print(f"{tokens / (time.monotonic() - started):.0f} tokens per second, all answers together")
