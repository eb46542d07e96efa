"""Checks the service: its settings, its secrets, its workers, and what its operators have left switched off."""

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from gateway.accounts.vault import Vault
from gateway.deploys.serving import ELSEWHERE
from gateway.errors import BackboneUnavailable
from gateway.inference.availability import is_emergency_off
from gateway.keys import APPS_FOLDER_KEY
from gateway.operations.backlog import read_backlog
from gateway.operations.sealed import ADD_KEY, count_sealed
from gateway.settings import Settings, find_doubts, find_unread
from workers.doctor.network import LOCAL
from workers.doctor.redis import open_store
from workers.doctor.row import Row
from workers.hosting.releases import Releases

NO_KEY = "not set: the tokens of the apps' pods are made from it"
FEWEST_CHARACTERS = 8  # that differ, in a token: 20 random hexadecimal digits have fewer once in 1,800 times
REPLACE = "replace it with the output of openssl rand -base64 32"
ROTATE = "put a new key before it (openssl rand -base64 32), restart, run capsule secrets reencrypt, and withdraw it"
CHOOSE_OPERATORS = "set GATEWAY_OPERATOR_TOKEN to the output of openssl rand -base64 32, or GATEWAY_OIDC_OPERATORS"


async def check_settings(settings: Settings) -> AsyncIterator[Row]:
    doubts = find_unread() + find_doubts(settings)
    for each in doubts:
        yield Row("settings", "warn", each.fault, each.action)
    if not doubts:
        yield Row("settings", "ok", "each variable is known")


async def check_operators(settings: Settings) -> AsyncIterator[Row]:
    if settings.operator_token or settings.operator_tokens or settings.oidc_operators:
        yield Row("operators", "ok", "somebody may use /ops and the operators' commands")
    else:
        yield Row("operators", "warn", "nobody may use /ops and the operators' commands", CHOOSE_OPERATORS)


async def check_tokens(settings: Settings) -> AsyncIterator[Row]:
    keys = (key.strip() for key in settings.encryption_key.split(","))
    tokens = [
        ("GATEWAY_OPERATOR_TOKEN", settings.operator_token, REPLACE),
        *(
            (f"the token of {name} in GATEWAY_OPERATOR_TOKENS", token, REPLACE)
            for name, token in settings.operator_tokens.items()
        ),
        *((f"key {number} of GATEWAY_ENCRYPTION_KEY", key, ROTATE) for number, key in enumerate(keys, 1)),
    ]
    weak = [(name, action) for name, token, action in tokens if token and len({*token}) < FEWEST_CHARACTERS]
    for name, action in weak:
        detail = f"{name} has fewer than {FEWEST_CHARACTERS} different characters, so it can be guessed"
        yield Row("weak tokens", "warn", detail, action)
    if not weak:
        yield Row("weak tokens", "ok", f"each has at least {FEWEST_CHARACTERS} different characters")


async def check_private_addresses(settings: Settings) -> AsyncIterator[Row]:
    if not settings.allow_private_addresses:
        yield Row("private addresses", "ok", "customers' addresses cannot lead to them")
    elif urlsplit(settings.base_url).hostname in LOCAL:
        yield Row("private addresses", "ok", "are allowed, and the service is for this machine only")
    else:
        detail = f"are allowed, so customers of {settings.base_url} reach this machine and its network"
        yield Row("private addresses", "fail", detail, "unset GATEWAY_ALLOW_PRIVATE_ADDRESSES")


async def check_emergency_file(settings: Settings) -> AsyncIterator[Row]:
    if is_emergency_off(settings):
        detail = f"{settings.emergency_off_file} exists, so inference is off on this machine"
        yield Row("emergency file", "warn", detail, "remove it once inference may be on again")
    else:
        yield Row("emergency file", "ok", f"there is no {settings.emergency_off_file}")


async def check_encryption_key(settings: Settings) -> AsyncIterator[Row]:
    action = "set GATEWAY_ENCRYPTION_KEY to a long random text, and keep a copy elsewhere"
    counts = None
    async with open_store(settings) as store:
        with suppress(BackboneUnavailable):  # the rows of Redis say so
            counts = await count_sealed(store, Vault(settings.encryption_key))
    if counts is not None and counts.unopened:
        yield Row("encryption key", "fail", counts.describe(), ADD_KEY)
    elif settings.encryption_key:
        yield Row("encryption key", "ok", "set" if counts is None else counts.describe())
    elif settings.apps_engine == "kubernetes":
        yield Row("encryption key", "fail", NO_KEY, action)
    else:
        yield Row("encryption key", "warn", "not set: webhooks and variables are refused", action)


async def check_workers(settings: Settings) -> AsyncIterator[Row]:
    """Looks for the heartbeats of all workers, on any machine."""
    async with open_store(settings) as store:
        try:
            backlog = await read_backlog(store, 0)
        except BackboneUnavailable:
            return
    alive = backlog.count_workers_alive(settings)
    if missing := [name for name, count in alive.items() if not count]:
        action = f"before the first start, this is normal; otherwise start capsule worker {' '.join(missing)}"
        yield Row("workers", "warn", f"none has a heartbeat: {', '.join(missing)}", action)
    else:
        yield Row("workers", "ok", ", ".join(f"{name} {count}" for name, count in alive.items()))


async def check_data_folder(settings: Settings) -> AsyncIterator[Row]:
    """Checks that a worker `sites` here would serve, and not stand by for another data folder."""
    if settings.storage_url:
        yield Row("data folder", "ok", "the storage is shared")
        return
    async with open_store(settings) as store:
        try:
            known = await store.get(APPS_FOLDER_KEY)
        except BackboneUnavailable:
            return
    if known not in (None, Releases(Path(settings.data_dir)).find_id()):
        reason, _, action = ELSEWHERE.partition("; ")
        yield Row("data folder", "fail", f"{settings.data_dir}: {reason}", f"set GATEWAY_DATA_DIR to it; {action}")
    else:
        yield Row("data folder", "ok", f"{settings.data_dir} has the apps, or will have them")
