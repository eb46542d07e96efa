"""A gateway with several model providers, each a stand-in."""

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.keys import (
    INFERENCE_KEY,
    answers_of_provider_key,
    failed_accounts_key,
    provider_key,
    refusal_key,
    trial_key,
)
from gateway.redis.scripts import CHANGES_CHANNEL
from tests.fakes import FakeProvider
from tests.fakes.provider import tokens
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import wait_until

UNSET = {"GATEWAY_PROVIDER_URL": "", "GATEWAY_PROVIDER_KEY": ""}
NAMES = ("one", "two", "three")


def write_providers(folder: Path, providers: Mapping[str, FakeProvider], **fields: Mapping[str, Any]) -> Path:
    """Writes a providers file, in the order of the mapping. `fields` are further ones, by the provider's name."""
    lines = []
    for name, provider in providers.items():
        key_file = folder / f"{name}.key"
        key_file.write_text(provider.key)
        table = {"name": name, "url": provider.url, "region": "fr-par", "key_file": str(key_file)}
        lines += [
            "[[provider]]",
            *(f"{key} = {_as_toml(value)}" for key, value in {**table, **fields.get(name, {})}.items()),
        ]
    path = folder / "providers.toml"
    path.write_text("\n".join([*lines, ""]))
    return path


def _as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_as_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)


@contextlib.asynccontextmanager
async def several_providers(
    folder: Path, constants: Mapping[str, float] = {}, *, fields: Mapping[str, Any] = {}, **settings: Any
) -> AsyncIterator[tuple[Gateway, list[FakeProvider]]]:
    """Runs a gateway with the providers `one`, `two` and `three`."""
    async with contextlib.AsyncExitStack() as stack:
        providers = [await stack.enter_async_context(FakeProvider()) for _ in NAMES]
        path = write_providers(folder, dict(zip(NAMES, providers, strict=True)), **fields)
        options = {**UNSET, "GATEWAY_PROVIDERS_FILE": str(path), **settings}
        gw = await stack.enter_async_context(gateway_with_redis(providers[0], folder, constants, **options))
        yield gw, providers


async def heal(gw: Gateway, providers: Sequence[FakeProvider]) -> None:
    """Makes the providers healthy and enabled, and lets the next account be alone there."""
    for provider in providers:
        provider.models_status = 200
        provider.default = tokens("default")
    with gw.redis.client() as client:
        for name in NAMES:
            client.delete(refusal_key(name), trial_key(name), answers_of_provider_key(name), failed_accounts_key(name))
            client.set(provider_key(name), "{}")
            client.publish(CHANGES_CHANNEL, provider_key(name))
        client.set(INFERENCE_KEY, "{}")
        client.publish(CHANGES_CHANNEL, INFERENCE_KEY)

    async def are_healthy() -> bool:
        report = (await gw.platform("GET", "inference")).json()
        rows = [
            row["status"] == "operational" and row["enabled"] and not row["passedOverUntil"]
            for row in report["providers"]
        ]
        return bool(report["managedInference"] and all(rows))

    await wait_until(are_healthy)


def plays(providers: Sequence[FakeProvider], *scripts: Any) -> str:
    """Lets each provider play its script for one prompt."""
    prompt = f"prompt {secrets.token_hex(8)}"
    for provider, script in zip(providers, scripts, strict=False):
        provider.plays(*(script if isinstance(script, tuple) else (script,)), prompt=prompt)
    return prompt


def asked(providers: Sequence[FakeProvider], prompt: str) -> list[int]:
    return [len(provider.asked(prompt)) for provider in providers]


async def states(gw: Gateway) -> dict[str, dict[str, Any]]:
    """Returns the providers' states by name, as operators see them."""
    response = await gw.platform("GET", "inference")
    assert response.status_code == 200, response.text
    return {row["name"]: row for row in response.json()["providers"]}
