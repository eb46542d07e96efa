"""The account API: the account's API keys."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Request, delete, get, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody

from gateway.accounts.api_keys import MAX_KEYS_BY_OPERATORS, NAME_LENGTH, CreatedKey, ListedKey
from gateway.errors import LastKey, NotFound, RequestMalformed
from gateway.http.audit import note
from gateway.http.authentication import Caller, account_router, operator_router
from gateway.process import Injected


class KeyName(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH)]


@post("/keys", errors=[RequestMalformed])
async def create_key(account: Caller, data: JSONBody[KeyName], gateway: Injected) -> CreatedKey:
    """Create an API key.

    The response has the key, which is shown only here.
    """
    return await gateway.registry.api_keys.create(account.id, data.name)


@get("/keys")
async def list_keys(account: Caller, gateway: Injected) -> list[ListedKey]:
    """List the account's API keys, newest first.

    The time of the last use lags by up to a minute.
    """
    return await gateway.registry.api_keys.list(account.id)


@delete("/keys/{key_id:str}", errors=[NotFound, LastKey])
async def revoke_key(account: Caller, key_id: FromPath[str], gateway: Injected) -> None:
    """Revoke an API key.

    The key and its sessions are refused from the next request on. The account's only key cannot be revoked.
    """
    await gateway.registry.api_keys.revoke(account.id, key_id)


@post("/accounts/{account_id:str}/keys", errors=[RequestMalformed, NotFound])
async def create_key_for(account_id: FromPath[str], data: JSONBody[KeyName], gateway: Injected) -> CreatedKey:
    """Create an API key for an account.

    For an account holder who lost theirs. The response has the key, which is shown only here.
    """
    if await gateway.registry.account(account_id) is None:
        raise NotFound
    return await gateway.registry.api_keys.create(account_id, data.name, limit=MAX_KEYS_BY_OPERATORS)


@get("/accounts/{account_id:str}/keys", errors=[NotFound])
async def list_keys_of(account_id: FromPath[str], gateway: Injected) -> list[ListedKey]:
    """List the API keys of an account, newest first."""
    if await gateway.registry.account(account_id) is None:
        raise NotFound
    return await gateway.registry.api_keys.list(account_id)


@delete("/accounts/{account_id:str}/keys/{key:str}", errors=[NotFound])
async def revoke_key_of(
    account_id: FromPath[str], key: FromPath[str], request: Request[Any, Any, State], gateway: Injected
) -> None:
    """Revoke an API key of an account, even its only one.

    The key and its sessions are refused from the next request on.
    """
    note(request, key=key)
    await gateway.registry.api_keys.revoke(account_id, key, even_last=True)


ROUTES = [
    account_router(create_key, list_keys, revoke_key),
    operator_router(create_key_for, list_keys_of, revoke_key_of),
]
