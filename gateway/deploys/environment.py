"""The environment variables of an app, for its builds and its start command, from the next deploy on.

A preview has the app's variables, except those that have another value in previews, or none. All variables of an app
are one record, so that a change of several is one compare-and-set, and what differs in previews is another. Each value
is encrypted. No response, log or command line ever has a value.
"""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from gateway.accounts.records import App
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.errors import RequestMalformed
from gateway.events.catalog import Kind
from gateway.ids import Time, now_iso
from gateway.keys import environment_key, preview_environment_key
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record

TOTAL_BYTES = 65_536  # of all names and values of a record
MAX_VARIABLES = 500  # of a record

NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
# The service sets these itself.
RESERVED = {"APP_URL", "DATA_DIR", "PORT", "HOST", "HOME", "PATH", "TMPDIR", "VITE_SERVICE_AI_URL"}
# The dynamic loader, the C library and OpenSSL read these in every process. The processes that confine a build start
# without its variables. Even if one of them got these, it must not load a customer's code.
UNSAFE = re.compile(
    r"LD_.*|GLIBC_TUNABLES|GCONV_PATH|GETCONF_DIR|HOSTALIASES|LOCALDOMAIN|LOCPATH|MALLOC_.*|NIS_PATH|NLSPATH"
    r"|RESOLV_HOST_CONF|RES_OPTIONS|TZDIR|OPENSSL_(CONF|ENGINES|MODULES)"
)


class Variable(msgspec.Struct, frozen=True):
    sealed: str  # '': previews do not have the variable
    bytes: int  # of name and value
    updatedAt: str


class VariableView(msgspec.Struct):
    name: str
    updatedAt: Time
    inPreviews: Literal["same", "other", "none"] | msgspec.UnsetType = msgspec.UNSET  # the value; only for previews


Variables = dict[str, Variable]
KEYS = {"live": environment_key, "preview": preview_environment_key}


class Environments:
    def __init__(self, store: Store, vault: Vault) -> None:
        self._store, self._vault = store, vault

    async def list_variables(self, app: App, kind: Kind = "live") -> list[VariableView]:
        """Returns the variables by name, without values."""
        variables = await self._read(app, "live")
        if kind == "live":
            return [VariableView(name, variables[name].updatedAt) for name in sorted(variables)]
        others = await self._read(app, "preview")
        return [
            VariableView(name, others[name].updatedAt, "other" if others[name].sealed else "none")
            if name in others
            else VariableView(name, variables[name].updatedAt, "same")
            for name in sorted({**variables, **others})
        ]

    async def change_variables(self, app: App, changes: Mapping[str, str | bool | None], kind: Kind = "live") -> None:
        """Sets variables; None removes one. Raises RequestMalformed before any change.

        Of kind `preview` are the values that differ in previews. False stands for none.
        """
        sealed = {name: None if value is None else self._seal(name, value) for name, value in changes.items()}

        async def compute(present: str) -> Change[None]:
            changed = {**_decode(present), **sealed}
            after = {name: variable for name, variable in changed.items() if variable is not None}
            _check_size(after)
            return Change(msgspec.json.encode(after).decode() if after else "", None)

        await change_record(self._store, KEYS[kind](app.account, app.id), compute, subject="the variables")

    async def open_variables(self, app: App, kind: Kind = "live") -> dict[str, str]:
        """Returns the decrypted values, for the worker that builds. Raises NoEncryptionKey."""
        variables = await self._read(app, "live")
        if kind == "preview":
            variables |= await self._read(app, "preview")
        return {name: self._vault.open(variable.sealed) for name, variable in variables.items() if variable.sealed}

    async def forget_variables(self, app: App) -> None:
        for key in KEYS.values():
            await self._store.client.delete(key(app.account, app.id))

    async def _read(self, app: App, kind: Kind) -> Variables:
        return _decode(await self._store.get(KEYS[kind](app.account, app.id)) or "")

    def _seal(self, name: str, value: str | bool) -> Variable:
        """Raises RequestMalformed, whose message never quotes the value."""
        if not NAME.fullmatch(name):
            raise RequestMalformed(f"{name[:64]}: a name consists of A-Z, 0-9 and _, and does not begin with a digit.")
        if name in RESERVED or name.startswith("GATEWAY_"):
            raise RequestMalformed(f"{name[:64]}: the service sets this variable itself; choose another name.")
        if UNSAFE.fullmatch(name):
            raise RequestMalformed(
                f"{name[:64]}: this name changes how programs are loaded; set it in a command instead."
            )
        if value is True:
            raise RequestMalformed(f"{name[:64]}: must be text, false or null, not true.")
        if value is False:
            return Variable("", len(name), now_iso())
        if "\0" in value:
            raise RequestMalformed(f"{name[:64]}: a value cannot contain a NUL character.")
        size = len(name) + len(value.encode())
        if size > TOTAL_BYTES:
            raise _too_large()
        try:
            return Variable(self._vault.seal(value), size, now_iso())
        except NoEncryptionKey as error:
            raise RequestMalformed(f"{name[:64]}: {error}.") from None


def _decode(record: str) -> Variables:
    return msgspec.json.decode(record, type=Variables) if record else {}


def _check_size(variables: Mapping[str, Variable]) -> None:
    if len(variables) > MAX_VARIABLES:
        raise RequestMalformed(
            f"An app has at most {MAX_VARIABLES} variables, and as many that differ in previews; remove some first."
        )
    if sum(variable.bytes for variable in variables.values()) > TOTAL_BYTES:
        raise _too_large()


def _too_large() -> RequestMalformed:
    return RequestMalformed(
        f"The names and values of an app's variables can have at most {TOTAL_BYTES // 1024} KiB in total, "
        "and what differs in previews as much again."
    )
