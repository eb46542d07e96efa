"""The operators, by name: only they can use the operators' API.

`GATEWAY_OPERATOR_TOKEN` is one token that operators share; `GATEWAY_OPERATOR_TOKENS` gives each operator a token. The
audit trail has the operator's name, and a fingerprint of the token that does not reveal it. `GATEWAY_OIDC_OPERATORS`
makes people operators who sign in with OpenID Connect.
"""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.accounts.api_keys import digest
from gateway.accounts.session_store import Person
from gateway.settings import Settings

SHARED_NAME = "operator"  # of operators who use the shared token


class Operator(msgspec.Struct, frozen=True):
    name: str  # or the e-mail address of an operator who signed in
    fingerprint: str  # 8 hex digits; empty for an operator without a token
    subject: str  # of their sessions; it changes with the token, which ends the sessions


class Operators:
    def __init__(self, settings: Settings) -> None:
        self._people = settings.oidc_operators
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

    def match(self, email: str, claims: Mapping[str, Any]) -> str:
        """Returns the entry of GATEWAY_OIDC_OPERATORS that matches somebody who signs in, or ""."""
        for entry in self._people:
            claim, equals, value = entry.partition("=")
            found = claims.get(claim, [])
            if value in map(_text_of, found if isinstance(found, list) else [found]) if equals else entry == email:
                return entry
        return ""

    def find_person(self, person: Person | None) -> Operator | None:
        """Returns the operator who has signed in, as long as the settings have the entry that made them one."""
        if person is None or person.operator not in self._people:
            return None
        return Operator(person.email, "", person.holder)

    def find_subject(self, subject: str | None) -> Operator | None:
        return next((operator for operator in self._tokens if operator.subject == subject), None)


def _text_of(claim: Any) -> str:
    """Returns what the settings write for a claim that is no text: `true`, or a number."""
    return claim if isinstance(claim, str) else msgspec.json.encode(claim).decode()


def _build_operator(name: str, token: str) -> Operator:
    fingerprint = hashlib.sha256(b"fingerprint:" + token.encode()).hexdigest()[:8]
    return Operator(name, fingerprint, f"operator:{digest(token)[:32]}")
