"""The model providers: their settings, and the file that names several of them.

The file is TOML, with a table `[[provider]]` for each provider, the preferred one first. It holds no keys, only the
names of the files or variables that do.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from gateway.settings.addresses import read_provider_url
from gateway.settings.toml import read_toml

DEFAULT_PROVIDER = "default"  # the name of the provider that the variables GATEWAY_PROVIDER_* describe
MAX_PROVIDERS = 8
MOST = 1 << 52  # of a count, which scripts in Redis still read exactly

_NAME = re.compile(r"[a-z0-9-]{1,32}")
_KEY = re.compile(r"[\x21-\x7e]+")


class ProviderRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The provider's quota per minute, for all gateways together. 0 means no quota."""

    requests: Annotated[int, msgspec.Meta(ge=0, le=MOST)] = 0
    tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST)] = 0


class ProviderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One provider."""

    name: str = DEFAULT_PROVIDER
    url: str
    region: str  # where it processes prompts
    key: str = ""
    key_file: str = ""  # replaces `key`; read again every second
    concurrency: int = 100  # concurrent requests, of all gateways together; 0: no limit
    rate: ProviderRate | None = None
    models: dict[str, str]  # what it serves → its name for that

    def read_key(self) -> str:
        """Reads the key from its file, if there is one; '' if there is no key that can be sent."""
        key = self.key
        if self.key_file:
            try:
                key = Path(self.key_file).read_text().strip()
            except (OSError, UnicodeDecodeError):
                key = ""
        return key if _KEY.fullmatch(key) else ""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A table of the file."""

    name: str
    url: str
    region: str
    key_file: str = ""
    key_env: str = ""
    concurrency: Annotated[int, msgspec.Meta(ge=0, le=MOST)] = 100
    rate: ProviderRate | None = None
    models: dict[str, str] | None = None  # None: all that have a price


class _File(msgspec.Struct, forbid_unknown_fields=True):
    provider: list[_Entry] = []


def read_providers(
    path: str, regions: Sequence[str], models: Collection[str], environ: Mapping[str, str]
) -> tuple[ProviderSettings, ...]:
    """Reads the file. Raises ValueError with the file, and the line or the key that is wrong.

    `regions` are those where prompts may go, and `models` those that have a price. `environ` has the variables that the
    file names.
    """
    with read_toml(path, _File) as file:
        entries = file.provider
        if not 1 <= len(entries) <= MAX_PROVIDERS:
            raise ValueError(f"must have 1 to {MAX_PROVIDERS} tables [[provider]]")
        for number, entry in enumerate(entries):
            if fault := _find_fault(entry, regions, models, {each.name for each in entries[:number]}):
                raise ValueError(f"provider[{number}].{fault}")
    return tuple(_settings_of(entry, models, environ) for entry in entries)


def list_key_variables(path: str) -> set[str]:
    """Returns the variables in which the file says that keys are; none of a file that cannot be read."""
    with contextlib.suppress(ValueError), read_toml(path, _File) as file:
        return {entry.key_env for entry in file.provider}
    return set()


def _find_fault(entry: _Entry, regions: Sequence[str], models: Collection[str], names: set[str]) -> str:
    """Returns the key that is wrong and why; '' if none is. It repeats no address, which may contain a password."""
    if not _NAME.fullmatch(entry.name):
        return "name: must be 1 to 32 characters of a-z, 0-9 and -"
    if entry.name in names:
        return f"name: {entry.name!r} is the name of another provider too"
    try:
        read_provider_url(entry.url)
    except ValueError as error:
        return f"url: {error}"
    if entry.region not in regions:
        return f"region: {entry.region!r} is not one of GATEWAY_REGIONS, where prompts may go: {', '.join(regions)}"
    if bool(entry.key_file) == bool(entry.key_env):
        return "key_file: name a file that has the key, or with key_env a variable; one of the two"
    if entry.models == {}:
        return "models: names no model; leave it out to serve all"
    for model, name in (entry.models or {}).items():
        if model not in models:
            return f"models: {model!r} has no price; choose from {', '.join(models)}, or add it to GATEWAY_PRICES_FILE"
        if not name:
            return f"models: {model!r} needs the provider's name for it"
    return ""


def all_of(models: Iterable[str]) -> dict[str, str]:
    """Returns the models under their own names."""
    return {model: model for model in models}


def _settings_of(entry: _Entry, models: Iterable[str], environ: Mapping[str, str]) -> ProviderSettings:
    return ProviderSettings(
        name=entry.name,
        url=read_provider_url(entry.url),
        region=entry.region,
        key=environ.get(entry.key_env, "").strip() if entry.key_env else "",
        key_file=entry.key_file,
        concurrency=entry.concurrency,
        rate=entry.rate if entry.rate is None or entry.rate.requests or entry.rate.tokens else None,
        models=all_of(models) if entry.models is None else entry.models,
    )
