"""The operators' API: suspends and resumes apps and accounts.

A suspension is part of the record, so that every process refuses requests within a second. Replacing an app's record
keeps it. The list for the hosts is written before (`suspended.py`), and deploys in progress are canceled after. Each
request can be repeated after an interruption.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Request, delete, put
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody

from gateway.accounts.operator_routes import require_account, require_app
from gateway.accounts.records import Account, App, Suspension
from gateway.accounts.suspended import list_suspended, unlist_suspended
from gateway.errors import NotFound, RequestMalformed
from gateway.http.audit import note_before
from gateway.http.authentication import operator_router
from gateway.ids import now_iso
from gateway.process import Gateway, Injected

REASON_LENGTH = 500  # characters
CANCELED = "the app was suspended"


class NewSuspension(msgspec.Struct, forbid_unknown_fields=True):
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=REASON_LENGTH)]


@put("/apps/{app:str}/suspension", errors=[RequestMalformed, NotFound])
async def suspend_app(
    app: FromPath[str], data: JSONBody[NewSuspension], request: Request[Any, Any, State], gateway: Injected
) -> Suspension:
    """Suspend an app.

    Its requests are refused within a second, its pages answer 503, and nothing of it runs or is deployed. Only its
    account and operators see the reason.
    """
    suspension = make_suspension(data)
    found = await require_app(app, gateway)
    _note_before(request, found)
    await list_suspended(gateway.store, found.account, found.id)
    await _set_suspension(found, suspension, gateway)
    await gateway.deploys.cancel_unfinished(found.account, found.id, CANCELED)
    return suspension


@delete("/apps/{app:str}/suspension", errors=[NotFound])
async def resume_app(app: FromPath[str], request: Request[Any, Any, State], gateway: Injected) -> None:
    """Lift the suspension of an app.

    The app stays suspended while its account is.
    """
    found = await require_app(app, gateway)
    _note_before(request, found)
    await _set_suspension(found, None, gateway)
    await unlist_suspended(gateway.store, found.account, found.id)


@put("/accounts/{account_id:str}/suspension", errors=[RequestMalformed, NotFound])
async def suspend_account(
    account_id: FromPath[str], data: JSONBody[NewSuspension], request: Request[Any, Any, State], gateway: Injected
) -> Suspension:
    """Suspend an account.

    This suspends all its apps, including future ones. Its API keys can still read.
    """
    suspension = make_suspension(data)
    _note_before(request, await require_account(account_id, gateway))
    await list_suspended(gateway.store, account_id)
    await gateway.registry.change_account(account_id, lambda record: _replace(record, suspension))
    await gateway.deploys.cancel_unfinished(account_id, None, CANCELED)
    return suspension


@delete("/accounts/{account_id:str}/suspension", errors=[NotFound])
async def resume_account(account_id: FromPath[str], request: Request[Any, Any, State], gateway: Injected) -> None:
    """Lift the suspension of an account.

    Apps that are suspended themselves stay suspended.
    """
    _note_before(request, await require_account(account_id, gateway))
    await gateway.registry.change_account(account_id, lambda record: _replace(record, None))
    await unlist_suspended(gateway.store, account_id)


def make_suspension(data: NewSuspension) -> Suspension:
    """Returns the suspension with the present time. Raises RequestMalformed for a blank reason."""
    if not (reason := data.reason.strip()):
        raise RequestMalformed(f"reason: 1 to {REASON_LENGTH} characters, which the owner sees.")
    return Suspension(reason, now_iso())


async def _set_suspension(app: App, suspension: Suspension | None, gateway: Gateway) -> None:
    await gateway.registry.change_app(app, lambda record: msgspec.structs.replace(record, suspension=suspension))


def _replace(account: Account, suspension: Suspension | None) -> Account:
    return msgspec.structs.replace(account, suspension=suspension)


def _note_before(request: Request[Any, Any, State], record: App | Account) -> None:
    if record.suspension is not None:
        note_before(request, reason=record.suspension.reason)


ROUTES = [operator_router(suspend_app, resume_app, suspend_account, resume_account)]
