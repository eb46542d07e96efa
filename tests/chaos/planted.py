"""Bugs that a run must find: `--plant NAME` starts the service with one, and a run of three minutes must report it.

A bug is a patch that the process applies before it runs its module.
"""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True)
class Plant:
    apply: Callable[[], None]
    expected: str  # part of the violation that the bug must cause


def _drop_text() -> None:
    """Drops 2 % of the texts: all tokens of one read of the provider's socket."""
    from gateway.inference.formats.native import Native

    texts = Native.texts
    Native.texts = lambda self, some: b"" if random.random() < 0.02 else texts(self, some)


def _mix_streams() -> None:
    """Sends a tenth of the texts to the next stream that reads something."""
    from gateway.inference.formats.native import Native

    texts, kept = Native.texts, list[bytes]()

    def mixed(self: Native, some: list[bytes]) -> bytes:
        other = kept.pop() if kept else b""
        if random.random() < 0.1:
            kept.append(texts(self, some))
            return other
        return other + texts(self, some)

    Native.texts = mixed


def _forget_settlements() -> None:
    """Does not repeat a settlement that Redis refused."""
    from gateway.inference.spend.admission import Admission, PendingSettlement

    later = Admission._settle_later

    def forgetful(self: Admission, settlement: PendingSettlement) -> None:
        if not settlement.cost:
            later(self, settlement)

    Admission._settle_later = forgetful


def _undercharge() -> None:
    """Settles one request in fifty at a nano-euro less."""
    from gateway.inference.spend.admission import Admission

    settle = Admission.settle

    async def settle_less(self: Admission, reservation: Any, cost: int) -> None:
        await settle(self, reservation, cost - (cost > 0 and random.random() < 0.02))

    Admission.settle = settle_less


def _free_reservations() -> None:
    """Settles the reservations of a dead gateway at nothing."""
    from gateway.inference.spend import scripts

    settle = scripts.settle

    async def settle_free(store: Any, tag: str, reservation: str, cost: int | None, record: Any = None) -> Any:
        return await settle(store, tag, reservation, cost or 0, record)

    scripts.settle = settle_free


def _raise_rates() -> None:
    """Raises the rate limits of apps and users by half."""
    from gateway.inference.spend import scripts

    admit = scripts.admit

    async def admit_more(store: Any, account: str, app: str, user: str, limits: Any, *some: Any, **more: Any) -> Any:
        rates = {"requests": limits.requests * 3 // 2, "user_requests": limits.user_requests * 3 // 2}
        return await admit(store, account, app, user, msgspec.structs.replace(limits, **rates), *some, **more)

    scripts.admit = admit_more


def _record_first() -> None:
    """Records an event as delivered before it is sent."""
    from gateway.events.records import DeliveryResult
    from workers.webhooks.sender import Sender

    send = Sender._send

    async def record_and_send(self: Sender, entry: Any, *some: Any) -> DeliveryResult:
        await self._record_delivery(entry, DeliveryResult("delivered", 200), some[-1])
        return await send(self, entry, *some)

    Sender._send = record_and_send


def _send_twice() -> None:
    """Sends every fifth event twice."""
    from gateway.events.records import DeliveryResult
    from workers.webhooks.sender import Sender

    send, count = Sender._send, 0

    async def send_again(self: Sender, *some: Any) -> DeliveryResult:
        nonlocal count
        count += 1
        if count % 5 == 0:
            await send(self, *some)
        return await send(self, *some)

    Sender._send = send_again


def _sign_wrongly() -> None:
    """Signs one event in twenty with a timestamp of ten minutes ago."""
    from workers.webhooks import sender

    sign = sender.sign_event

    def sign_other(secrets: Any, event: str, kind: str, data: str, now: float) -> Any:
        return sign(secrets, event, kind, data, now - (600 if random.random() < 0.05 else 0))

    sender.sign_event = sign_other


def _fail_health() -> None:
    """Fails one health check in ten."""
    from gateway.deploys.states import DeployError
    from workers.engine.steps import ReleaseSteps

    check = ReleaseSteps.check

    async def check_or_fail(self: ReleaseSteps, target: Any) -> None:
        if random.random() < 0.1:
            raise DeployError("GET / returned 500")
        await check(self, target)

    ReleaseSteps.check = check_or_fail


def _serve_nothing_new() -> None:
    """Skips every second swap of an app that has a live release, and reports it as done."""
    from workers.hosting.releases import Site

    swap = Site.swap

    def forget(self: Site, deploy_id: str, *, canary: bool = False) -> None:
        if self.current is None or random.random() >= 0.5:
            swap(self, deploy_id, canary=canary)

    Site.swap = forget


def _log_content() -> None:
    """Logs one token in a hundred."""
    from gateway.inference.auth import users

    verify = users.Users.verify

    async def verify_and_print(self: Any, app: Any, token: bytes) -> str:
        if random.random() < 0.01:
            print(f"verifying {token.decode()}", flush=True)
        return await verify(self, app, token)

    users.Users.verify = verify_and_print


PLANTS = {
    "drop text": Plant(_drop_text, "with another text"),
    "mix streams": Plant(_mix_streams, "with another text"),
    "forget settlements": Plant(_forget_settlements, "more than the most possible"),
    "undercharge": Plant(_undercharge, "less than the least possible"),
    "free reservations": Plant(_free_reservations, "less than the least possible"),
    "raise rates": Plant(_raise_rates, "passed"),
    "record first": Plant(_record_first, "was lost"),
    "send twice": Plant(_send_twice, "came twice within"),
    "sign wrongly": Plant(_sign_wrongly, "with a wrong signature"),
    "fail health": Plant(_fail_health, "no fault explains it"),
    "serve nothing new": Plant(_serve_nothing_new, "is live, and host"),
    "log content": Plant(_log_content, "a user's token"),
}


def run_planted(name: str, module: str) -> None:
    """Runs a module with the bug, as `python -m` does."""
    PLANTS[name].apply()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def make_command(name: str, module: str) -> list[str]:
    return [sys.executable, "-c", f"from tests.chaos.planted import run_planted; run_planted({name!r}, {module!r})"]
