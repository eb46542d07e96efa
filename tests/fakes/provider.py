"""An OpenAI-compatible model provider that plays a test's script for each prompt."""

import json
import secrets
import ssl
from typing import Any

from tests.fakes.server import Exchange, FakeServer, Script, Step, answer

MODEL = "gpt-oss-120b"
# Words that occur nowhere else, so that a search for them finds leaked content.
COMPLETIONS = ("Mandarine", " ardoise")


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunk(
    content: str | None = None,
    *,
    finish: str | None = None,
    usage: tuple[Any, Any] | None = None,
    model: str = MODEL,
    **delta: Any,
) -> bytes:
    """Returns one event. `usage` is the tokens of (prompt, completion)."""
    body: dict[str, Any] = {
        "id": "chatcmpl-fake",
        "object": "chat.completion.chunk",
        "created": 1_750_000_000,
        "model": model,
        "choices": [],
    }
    if content is not None:
        delta["content"] = content
    if delta or finish:
        body["choices"] = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
    if usage:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return event(body)


DONE = b"data: [DONE]\n\n"
ROLE = chunk("", role="assistant")


def tokens(*words: str, usage: tuple[Any, Any] | None = (7, 3), model: str = MODEL, finish: str = "stop") -> Script:
    """Returns a complete stream, event by event, as the real provider sends it."""
    script: Script = [chunk("", role="assistant", model=model), *(chunk(w, model=model) for w in words)]
    script.append(chunk(finish=finish, model=model))
    if usage:
        script.append(chunk(usage=usage, model=model))
    return [*script, DONE]


def call_part(index: int = 0, *, id: str | None = None, name: str | None = None, arguments: str | None = None) -> bytes:
    """Returns one event with a part of a tool call."""
    function = {k: v for k, v in {"name": name, "arguments": arguments}.items() if v is not None}
    part = {"index": index, **({"id": id, "type": "function"} if id else {}), "function": function}
    return chunk(tool_calls=[part])


def calls(*parts: bytes, usage: tuple[int, int] = (9, 4)) -> Script:
    """Returns a complete stream of an answer that calls tools."""
    begin = chunk(role="assistant", content=None, tool_calls=[])
    return [begin, *parts, chunk(finish="tool_calls"), chunk(usage=usage), DONE]


def joined(script: Script) -> bytes:
    """Returns all body writes of a script as one."""
    return b"".join(step for step in script if isinstance(step, bytes))


def flood(count: int, size: int) -> Script:
    """Returns `count` tokens of `size` bytes, sent as fast as they are read."""
    return [ROLE, *([chunk("x" * size)] * count), chunk(finish="stop"), chunk(usage=(1, 1)), DONE]


class FakeProvider(FakeServer):
    """`plays` sets a script and returns a unique prompt for it. `asked` returns the requests with a prompt."""

    key = "fake-provider-key-" + secrets.token_hex(8)

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls)
        self.models_status = 200
        self.models_script: Script | None = None  # played instead of an answer with `models_status`
        self.default: Script = tokens(*COMPLETIONS)
        self._scripts: dict[str, Script] = {}
        self._by_prompt: dict[str, list[Exchange]] = {}

    @property
    def url(self) -> str:
        return f"{self.address}/v1"

    def plays(self, *steps: Step | Script, prompt: str | None = None) -> str:
        prompt = prompt or f"prompt {secrets.token_hex(8)}"
        self._scripts[prompt] = [s for step in steps for s in (step if isinstance(step, list) else [step])]
        return prompt

    def asked(self, prompt: str) -> list[Exchange]:
        return self._by_prompt.get(prompt, [])

    @property
    def probes(self) -> list[Exchange]:
        return [e for e in self.exchanges if e.path.endswith("/v1/models")]

    @property
    def prompts(self) -> list[str]:
        return list(self._by_prompt)

    def script(self, exchange: Exchange) -> Script:
        if exchange.path.endswith("/v1/models"):
            return self.models_script or answer(
                self.models_status, {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            )
        if not exchange.path.endswith("/v1/chat/completions") or exchange.method != "POST":
            return answer(404, {"error": {"message": "no such path"}})
        if exchange.header("authorization") != f"Bearer {self.key}":
            return answer(401, {"error": {"message": "bad key"}})
        prompt = _text(exchange.json["messages"][-1]["content"])
        self._by_prompt.setdefault(prompt, []).append(exchange)
        return self._scripts.get(prompt, self.default)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())
