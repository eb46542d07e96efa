"""The account API: the account's API keys."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, delete, get, post
from litestar.params import FromPath, JSONBody

from gateway.accounts.api_keys import MAX_KEYS_BY_OPERATORS, NAME_LENGTH, ApiKeys
from gateway.errors import LastKey, NotFound, RequestMalformed
from gateway.events.catalog import Time
from gateway.http.authentication import (
    ACCOUNT_DEPENDENCY,
    ACCOUNT_SECURITY,
    OPERATOR_SECURITY,
    Caller,
    account_only,
    operators_only,
)
from gateway.process import Injected


class KeyName(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH)]


class KeyView(msgspec.Struct):
    """An API key as its account sees it."""

    id: str
    name: str
    createdAt: Time


class CreatedKey(KeyView):
    key: str  # shown only here


class ListedKey(KeyView):
    lastUsedAt: Time | None


async def create_and_view(api_keys: ApiKeys, account_id: str, name: str, **limit: int) -> CreatedKey:
    key, secret = await api_keys.create(account_id, name, **limit)
    return CreatedKey(key.id, key.name, key.createdAt, secret)


@post("/account/keys", errors=[RequestMalformed])
async def create_key(account: Caller, data: JSONBody[KeyName], gateway: Injected) -> CreatedKey:
    """Create an API key.

    The response has the key, which is shown only here.
    """
    return await create_and_view(gateway.registry.api_keys, account.id, data.name)


@get("/account/keys")
async def list_keys(account: Caller, gateway: Injected) -> list[ListedKey]:
    """List the account's API keys, newest first.

    The time of the last use lags by up to a minute.
    """
    listed = await gateway.registry.api_keys.list(account.id)
    return [ListedKey(key.id, key.name, key.createdAt, last_used) for key, last_used in listed]


@delete("/account/keys/{key_id:str}", errors=[NotFound, LastKey])
async def revoke_key(account: Caller, key_id: FromPath[str], gateway: Injected) -> None:
    """Revoke an API key.

    The key and its sessions are refused from the next request on. The account's only key cannot be revoked.
    """
    await gateway.registry.api_keys.revoke(account.id, key_id)


@post("/platform/accounts/{account_id:str}/keys", errors=[RequestMalformed, NotFound])
async def create_key_for(account_id: FromPath[str], data: JSONBody[KeyName], gateway: Injected) -> CreatedKey:
    """Create an API key for an account.

    For an account holder who lost theirs. The response has the key, which is shown only here.
    """
    if await gateway.registry.account(account_id) is None:
        raise NotFound
    return await create_and_view(gateway.registry.api_keys, account_id, data.name, limit=MAX_KEYS_BY_OPERATORS)


ROUTES = [
    Router(
        "/",
        route_handlers=[create_key, list_keys, revoke_key],
        guards=[account_only],
        dependencies=ACCOUNT_DEPENDENCY,
        tags=["Account"],
        security=ACCOUNT_SECURITY,
    ),
    Router(
        "/",
        route_handlers=[create_key_for],
        guards=[operators_only],
        tags=["Platform"],
        security=OPERATOR_SECURITY,
    ),
]
