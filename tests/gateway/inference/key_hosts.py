"""Hosts that serve apps' key sets, without a network."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import jwt

from gateway.accounts.records import App
from gateway.inference.auth.key_sets import KeySet
from gateway.inference.auth.users import Users
from gateway.outbound import client as outbound
from tests.fakes.backend import jwk


class Hosts(outbound.Client):
    """Answers with the keys that a test sets for each host; other hosts answer 404."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}  # private keys by host
        self.fetched: list[str] = []
        self.kid: str | None = None  # of all keys; None: the host
        self.gate = asyncio.Event()  # answers wait for it
        self.gate.set()

    async def fetch(self, method: str, url: str, **options: Any) -> outbound.Response:
        host = url.split("/")[2]
        self.fetched.append(host)
        await self.gate.wait()
        document = {"keys": [jwk("ES256", self.keys[host], self.kid or host)]} if host in self.keys else {}
        headers: Mapping[str, str] = {}
        return outbound.Response(200 if document else 404, headers, json.dumps(document).encode())


def key_set(users: Users) -> KeySet:
    return users._key_sets["victim"][1]


def age(users: Users, seconds: float) -> None:
    """Makes the process's keys older."""
    key_set(users)._fetched_at -= seconds
    key_set(users)._tried_at -= seconds
    key_set(users)._refetched_at -= seconds


def token(key: Any, sub: str, host: str = "victim.apps.example") -> bytes:
    claims = {"sub": sub, "exp": int(time.time()) + 600}
    return jwt.encode(claims, key, algorithm="ES256", headers={"kid": host}).encode()


def an_app(**fields: Any) -> App:
    given = {"id": "victim", "name": "victim", "account": "acc_1", "createdAt": "2026-11-21T00:00:00.000Z"}
    return App(**(given | fields))
