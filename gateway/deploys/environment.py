"""The environment variables of an app, for its builds and its start command, from the next deploy on.

All variables of an app are one record, so that a change of several is one compare-and-set. Each value is sealed; no
answer, log or command line ever holds one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from gateway.accounts.records import App
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.deploys.keys import environment_key
from gateway.errors import BackboneUnavailable, RequestMalformed
from gateway.events.catalog import Time
from gateway.ids import now_iso
from gateway.redis.client import Store
from gateway.redis.scripts import compare_and_set

TOTAL_BYTES = 65_536  # of all names and values of an app
MAX_VARIABLES = 500  # of an app
ATTEMPTS = 10  # to change a record that others change too

NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
# The service sets these itself.
RESERVED = {"PORT", "HOST", "HOME", "PATH", "TMPDIR", "VITE_SERVICE_AI_URL"}
# The dynamic loader, the C library and OpenSSL read these in every process. The processes that confine a build start
# without its variables; should one of them get these all the same, it must not load a customer's code.
UNSAFE = re.compile(
    r"LD_.*|GLIBC_TUNABLES|GCONV_PATH|GETCONF_DIR|HOSTALIASES|LOCALDOMAIN|LOCPATH|MALLOC_.*|NIS_PATH|NLSPATH"
    r"|RESOLV_HOST_CONF|RES_OPTIONS|TZDIR|OPENSSL_(CONF|ENGINES|MODULES)"
)


class Variable(msgspec.Struct, frozen=True):
    sealed: str
    bytes: int  # of name and value
    updatedAt: str


class VariableView(msgspec.Struct):
    name: str
    updatedAt: Time


Variables = dict[str, Variable]


class Environments:
    def __init__(self, store: Store, vault: Vault) -> None:
        self._store, self._vault = store, vault

    async def list(self, app: App) -> list[VariableView]:
        """By name, without values."""
        _, variables = await self._read(app)
        return [VariableView(name, variables[name].updatedAt) for name in sorted(variables)]

    async def change(self, app: App, changes: Mapping[str, str | None]) -> None:
        """Sets variables; None removes one. Raises RequestMalformed, and changes nothing then."""
        sealed = {name: None if value is None else self._seal(name, value) for name, value in changes.items()}
        for _ in range(ATTEMPTS):
            record, variables = await self._read(app)
            after = {name: variable for name, variable in {**variables, **sealed}.items() if variable is not None}
            _check_size(after)
            text = msgspec.json.encode(after).decode() if after else ""
            if await compare_and_set(self._store, environment_key(app.account, app.id), text, expected=record):
                return
        raise BackboneUnavailable("The variables are being changed from several places at once; try again.")

    async def open(self, app: App) -> dict[str, str]:
        """The values, for the worker that builds. Raises NoEncryptionKey."""
        _, variables = await self._read(app)
        return {name: self._vault.open(variable.sealed) for name, variable in variables.items()}

    async def forget(self, app: App) -> None:
        await self._store.client.delete(environment_key(app.account, app.id))

    async def _read(self, app: App) -> tuple[str, Variables]:
        record = await self._store.get(environment_key(app.account, app.id)) or ""
        return record, msgspec.json.decode(record, type=Variables) if record else {}

    def _seal(self, name: str, value: str) -> Variable:
        """Raises RequestMalformed, which never quotes the value."""
        if not NAME.fullmatch(name):
            raise RequestMalformed(f"{name[:64]}: a name consists of A-Z, 0-9 and _, and begins with no digit.")
        if name in RESERVED or name.startswith("GATEWAY_"):
            raise RequestMalformed(f"{name[:64]}: the service sets this variable itself; choose another name.")
        if UNSAFE.fullmatch(name):
            raise RequestMalformed(
                f"{name[:64]}: this name changes how programs are loaded; set it in a command instead."
            )
        if "\0" in value:
            raise RequestMalformed(f"{name[:64]}: a value cannot contain a NUL character.")
        size = len(name) + len(value.encode())
        if size > TOTAL_BYTES:
            raise _too_large()
        try:
            return Variable(self._vault.seal(value), size, now_iso())
        except NoEncryptionKey as error:
            raise RequestMalformed(f"{name[:64]}: {error}.") from None


def _check_size(variables: Mapping[str, Variable]) -> None:
    if len(variables) > MAX_VARIABLES:
        raise RequestMalformed(f"An app has at most {MAX_VARIABLES} variables; remove some first.")
    if sum(variable.bytes for variable in variables.values()) > TOTAL_BYTES:
        raise _too_large()


def _too_large() -> RequestMalformed:
    return RequestMalformed(
        f"The names and values of an app's variables have at most {TOTAL_BYTES // 1024} KiB in all."
    )
