"""The operators, by name: only they can use the operators' API.

`GATEWAY_OPERATOR_TOKEN` is one token that operators share; `GATEWAY_OPERATOR_TOKENS` gives each operator a token. The
audit trail has the operator's name, and a fingerprint of the token that does not reveal it.
"""

import hashlib
import hmac

import msgspec

from gateway.accounts.api_keys import digest
from gateway.settings import Settings

SHARED_NAME = "operator"  # of operators who use the shared token


class Operator(msgspec.Struct, frozen=True):
    name: str
    fingerprint: str  # 8 hex digits
    subject: str  # of their sessions; it changes with the token, which ends the sessions


class Operators:
    def __init__(self, settings: Settings) -> None:
        shared = {SHARED_NAME: settings.operator_token} if settings.operator_token else {}
        self._tokens = {
            _build_operator(name, token): token for name, token in {**shared, **settings.operator_tokens}.items()
        }

    def find(self, credential: str) -> Operator | None:
        """Returns the operator of a token. Compares with all tokens, each in constant time."""
        found = None
        for operator, token in self._tokens.items():
            if hmac.compare_digest(credential.encode(), token.encode()):
                found = operator
        return found

    def find_subject(self, subject: str | None) -> Operator | None:
        return next((operator for operator in self._tokens if operator.subject == subject), None)


def _build_operator(name: str, token: str) -> Operator:
    fingerprint = hashlib.sha256(b"fingerprint:" + token.encode()).hexdigest()[:8]
    return Operator(name, fingerprint, f"operator:{digest(token)[:32]}")
