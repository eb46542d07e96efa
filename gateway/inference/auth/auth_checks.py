"""Checks how an app verifies tokens when its owner saves it: one call to the app's backend, within five seconds.

The result is advice. It is saved nowhere, and the check changes no key set that verifies tokens.
"""

import httpx
import msgspec

from gateway.accounts.jose import jwt
from gateway.accounts.jose.jwk import read_document, read_key
from gateway.accounts.records import App, BackendAuth, JwksAuth
from gateway.inference.auth.backend import ANSWER_BYTES, CALL_SECONDS
from gateway.inference.auth.key_sets import BadStatus, fetch_document
from gateway.inference.auth.users import REFUSALS, Users, find_user
from gateway.outbound.addresses import CallFailed, is_internal

UNSIGNED = "Bearer capsule-check"  # a token that no backend accepts
NO_KEY = "The key set has no key that can verify tokens; publish public keys of the types RSA, EC or OKP."
NO_KEY_SET = "The answer is not a key set; publish a JSON object with the member 'keys'."
NOT_PUBLIC = "The address is not public, so no token can be verified; use one that the internet can reach."
ACCEPTS_ALL = "The backend accepted a token that nobody signed; let it answer invalid tokens with status 401."


class AuthCheck(msgspec.Struct):
    """Whether users' tokens can be verified now."""

    ok: bool
    keys: int | msgspec.UnsetType = msgspec.UNSET  # in the key set that can verify tokens
    algorithms: list[str] | msgspec.UnsetType = msgspec.UNSET  # that tokens may use
    problem: str | msgspec.UnsetType = msgspec.UNSET  # what to mend, if not ok


async def check_auth(users: Users, app: App, *, allow_private: bool) -> AuthCheck:
    """Checks an app's verification of tokens. Raises no error of the backend."""
    auth = app.auth
    if not isinstance(auth, JwksAuth | BackendAuth):
        return AuthCheck(True, algorithms=list(jwt.HMAC))
    if not allow_private and is_internal(auth.url):
        return AuthCheck(False, problem=NOT_PUBLIC)
    try:
        if isinstance(auth, JwksAuth):
            return await _check_key_set(users, app, auth)
        return await _check_backend(users, app, auth)
    except CallFailed as error:
        return AuthCheck(False, problem=str(error))


async def _check_key_set(users: Users, app: App, auth: JwksAuth) -> AuthCheck:
    """Raises CallFailed."""
    http, url = users.resolve_url(app, auth)
    try:
        keys = await read_document(await fetch_document(http, url, app.account), read_key)
    except BadStatus as error:
        return AuthCheck(False, problem=f"{httpx.URL(url).host} answered with {error}; it must be 200.")
    except (ValueError, RecursionError):
        return AuthCheck(False, problem=NO_KEY_SET)
    algorithms = sorted({algorithm for key in keys for algorithm in key.algorithms})
    if not keys:
        return AuthCheck(False, 0, algorithms, NO_KEY)
    return AuthCheck(True, len(keys), algorithms)


async def _check_backend(users: Users, app: App, auth: BackendAuth) -> AuthCheck:
    """Raises CallFailed."""
    http, url = users.resolve_url(app, auth)
    headers = {"authorization": UNSIGNED, "accept": "application/json"}
    answer = await http.fetch(
        auth.method, url, tenant=app.account, headers=headers, budget=CALL_SECONDS, max_bytes=ANSWER_BYTES
    )
    if 200 <= answer.status < 300 and find_user(answer.body, auth) is not None:
        return AuthCheck(False, problem=ACCEPTS_ALL)
    if answer.status == 404 or not (200 <= answer.status < 300 or answer.status in REFUSALS):
        host = httpx.URL(url).host
        return AuthCheck(False, problem=f"{host} answered an invalid token with status {answer.status} instead of 401.")
    return AuthCheck(True)
