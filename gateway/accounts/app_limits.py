"""The limits that an account holder sets for an app: their fields, options of the command line and labels."""

from typing import Annotated, NamedTuple, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.validation import Euro, Rate


def _shown(description: str, option: str, label: str) -> Meta:
    return Meta(description=description, extra={"option": option, "label": label})


class LimitsChange(msgspec.Struct, forbid_unknown_fields=True):
    """Null clears a limit; a limit that is left out stays. 0 refuses all requests."""

    dailyEuro: Annotated[
        Euro | UnsetType | None,
        _shown('euro per UTC day of the app, as "0.50"', "--daily-euro", "per day"),
    ] = UNSET
    userDailyEuro: Annotated[
        Euro | UnsetType | None,
        _shown("euro per UTC day of each user", "--user-daily-euro", "per day and user"),
    ] = UNSET
    requestsPerMinute: Annotated[
        Rate | UnsetType | None,
        _shown("requests per minute of the app", "--rpm", "per minute"),
    ] = UNSET
    userRequestsPerMinute: Annotated[
        Rate | UnsetType | None,
        _shown("requests per minute of each user", "--user-rpm", "per minute and user"),
    ] = UNSET


class AppLimit(NamedTuple):
    """How people see a limit."""

    option: str
    label: str
    help: str
    is_money: bool


def _describe(field: msgspec.structs.FieldInfo) -> AppLimit:
    meta = next(each for each in get_args(field.type) if isinstance(each, Meta))
    text, shown = meta.description or "", meta.extra or {}
    return AppLimit(shown["option"], shown["label"], f"{text[:1].upper()}{text[1:]}.", field.name.endswith("Euro"))


APP_LIMITS = {field.name: _describe(field) for field in msgspec.structs.fields(LimitsChange)}
