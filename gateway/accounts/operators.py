"""The operators: who may use the operators' API, by name.

`GATEWAY_OPERATOR_TOKEN` is one token that operators share; `GATEWAY_OPERATOR_TOKENS` gives each a token of their own.
The audit trail names the operator, and the token by a fingerprint that does not give the token away.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from gateway.accounts.credentials import digest
from gateway.settings import Settings

SHARED = "operator"  # name of those who use the shared token


class Operator(msgspec.Struct, frozen=True):
    name: str
    fingerprint: str  # 8 hex digits
    subject: str  # of their sessions. It changes with the token, which ends the sessions


class Operators:
    def __init__(self, settings: Settings) -> None:
        shared = {SHARED: settings.operator_token} if settings.operator_token else {}
        self._tokens = {_operator(name, token): token for name, token in {**shared, **settings.operator_tokens}.items()}

    def find(self, credential: str) -> Operator | None:
        """The operator of a token. Compares with all of them, each in constant time."""
        found = None
        for operator, token in self._tokens.items():
            if hmac.compare_digest(credential.encode(), token.encode()):
                found = operator
        return found

    def find_subject(self, subject: str | None) -> Operator | None:
        return next((operator for operator in self._tokens if operator.subject == subject), None)


def _operator(name: str, token: str) -> Operator:
    fingerprint = hashlib.sha256(b"fingerprint:" + token.encode()).hexdigest()[:8]
    return Operator(name, fingerprint, f"operator:{digest(token)[:32]}")
