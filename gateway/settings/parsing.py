"""Reads the settings from the environment and a `.env` file. Nothing else in the project reads the environment.

The field `redis_url` comes from the variable `GATEWAY_REDIS_URL`, and so on.
"""

import difflib
import ipaddress
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from gateway.settings import addresses
from gateway.settings.model import NANO, PLANS, ProviderTimeouts, RateLimits, Settings
from gateway.settings.prices import DEFAULT_MODEL, TARIFFS, read_prices
from gateway.settings.providers import ProviderRate, list_key_variables, read_providers
from gateway.validation import is_email

SHORTEST_CLAIM_IDLE_SECONDS = 10.0
SHORTEST_TOKEN = 20  # characters of an operator's token
_OF_ONE_PROVIDER = tuple(f"GATEWAY_PROVIDER_{name}" for name in ("URL", "KEY", "KEY_FILE", "CONCURRENCY", "RATE"))
T = TypeVar("T")
N = TypeVar("N", int, float)


class BadSettings(Exception):
    """The message has one line for each variable that is wrong."""


# Settings of earlier versions, and what holds instead.
GONE = {
    "GATEWAY_APPS_SERVER": "Caddy serves the apps",
    **dict.fromkeys(
        ("GATEWAY_APPS_HOST", "GATEWAY_HOST_ADDRESS"),
        "one host serves all apps, and beyond one machine Kubernetes does (docs/kubernetes.md)",
    ),
    "GATEWAY_APP_DATA_SYNC": "one host has the data of the apps, whose `sites` worker keeps snapshots",
}
# Variables that are no settings: of the command line, of compose.yaml, of pods, and of docs/examples.
OTHERS = {
    *("CAPSULE_API_KEY", "CAPSULE_PORT", "CAPSULE_URL"),
    *("CAPSULE_BACKUPS", "CAPSULE_BACKUP_TARGET", "CAPSULE_FILES", "CAPSULE_LISTEN"),
    "CAPSULE_POD",
    *("CAPSULE_APP", "CAPSULE_PROMPT", "CAPSULE_SESSION_URL"),
}
# Kubernetes sets these in pods, for a service that has such a name.
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_LABEL = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"  # of a name in Kubernetes
_LIKENESS = 0.7  # of a name to the one that was probably meant; 1 is the same


class Doubt(NamedTuple):
    """What is allowed in the settings, and probably not meant."""

    fault: str
    action: str


def find_unread(environ: Mapping[str, str] | None = None) -> list[Doubt]:
    """Returns the variables of earlier versions, and those whose name is probably misspelt.

    Other programs have variables that begin with CAPSULE_, so such a name counts only if it is like one that is known.
    """
    environ = read_environment() if environ is None else environ
    known = {_variable(field.name) for field in msgspec.structs.fields(Settings)} | OTHERS
    named = list_key_variables(environ.get("GATEWAY_PROVIDERS_FILE", "").strip())
    found = []
    for name in sorted(name for name, text in environ.items() if text.strip() and name not in known | named):
        prefix = next((each for each in ("GATEWAY_", "CAPSULE_") if name.startswith(each)), "")
        if name in GONE:
            found.append(Doubt(f"{name} is gone: {GONE[name]}", "unset it"))
        elif prefix and not _SERVICE_LINK.fullmatch(name):
            near = _find_nearest(name.removeprefix(prefix), known)
            if near or prefix == "GATEWAY_":
                action = f"did you mean {near}?" if near else "unset it"
                found.append(Doubt(f"{name} is unknown, and nothing reads it", action))
    return found


def find_doubts(settings: Settings) -> list[Doubt]:
    """Returns what is doubtful about the providers."""
    found = [
        Doubt(f"provider {each.name}: prompts go there without TLS", "use https://, unless it is in your own network")
        for each in settings.providers
        if urlsplit(each.url).scheme == "http" and not addresses.is_near(each.url)
    ]
    if DEFAULT_MODEL not in settings.models:
        fault = f"no provider serves {DEFAULT_MODEL}, so requests that name no model are refused"
        found.append(Doubt(fault, "let a provider serve it"))
    return found


def _find_nearest(name: str, known: Iterable[str]) -> str:
    """Returns the variable whose name after the prefix is most like this one; '' if none is."""
    names = {each.partition("_")[2]: each for each in sorted(known)}
    return next((names[each] for each in difflib.get_close_matches(name, names, 1, _LIKENESS)), "")


def _variable(field: str) -> str:
    return "GATEWAY_" + field.upper()


def load(environ: Mapping[str, str] | None = None, env_file: str = ".env") -> Settings:
    """Raises BadSettings with one line for each variable that is wrong."""
    if environ is None:
        environ = read_environment(env_file)
        # The libraries that speak S3 and OTLP read these from the environment.
        os.environ.update({k: v for k, v in environ.items() if k.startswith(("AWS_", "OTEL_"))})
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for field in msgspec.structs.fields(Settings):
        name = _variable(field.name)
        text = environ.get(name, "").strip()
        if not text:
            continue
        try:
            values[field.name] = _READERS.get(field.name, _BY_TYPE.get(field.type, str))(text)
        except (ValueError, OSError) as error:
            wrong.append(f"{name}: {error}")
    if values.get("storage_url", "").startswith("s3:") and (fault := addresses.find_s3_fault(environ)):
        wrong.append(f"GATEWAY_STORAGE_URL: {fault}")
    if values.get("trust_builds") and not values.get("allow_private_addresses"):
        wrong.append("GATEWAY_TRUST_BUILDS: is for development only and needs GATEWAY_ALLOW_PRIVATE_ADDRESSES")
    if values.get("apps_engine") == "kubernetes" and not values.get("storage_url"):
        wrong.append(
            "GATEWAY_APPS_ENGINE: pods get their releases from a shared storage; set GATEWAY_STORAGE_URL=s3://…"
        )
    wrong += _find_oidc_faults(values, environ)
    wrong += _find_mail_faults(values)
    if path := values.get("providers_file"):
        unused = (name for name in _OF_ONE_PROVIDER if environ.get(name, "").strip())
        wrong += [
            f"{name}: describes one provider, but GATEWAY_PROVIDERS_FILE names several; unset it" for name in unused
        ]
        try:
            values["providers_file"] = read_providers(
                path,
                values.get("regions", Settings().regions),
                values.get("prices_file", TARIFFS)[0].prices,
                environ,
            )
        except ValueError as error:
            wrong.append(f"GATEWAY_PROVIDERS_FILE: {error}")
    if wrong:
        raise BadSettings("\n".join(wrong))
    settings = Settings(**values)
    return msgspec.structs.replace(settings, api_url=settings.api_url or settings.base_url)


def _find_mail_faults(values: Mapping[str, Any]) -> list[str]:
    if not {"smtp_url", "smtp_url_file"} & values.keys():
        return []
    needed = {"mail_from": "the sender's address", "encryption_key": "which signs the links that end the notices"}
    return [
        f"{_variable(name)}: is missing; notices by e-mail need {what}"
        for name, what in needed.items()
        if name not in values
    ]


def read_environment(env_file: str = ".env") -> dict[str, str]:
    """Returns the variables of the `.env` file and, before them, those of the environment. Raises BadSettings."""
    return {**_read_file(env_file), **os.environ}


def find_s3_fault() -> str:
    """Returns what S3 needs and this process lacks, once the settings are loaded; '' if it lacks nothing."""
    return addresses.find_s3_fault(os.environ)


def find_temporary_fault() -> str:
    """Returns what is wrong with the folder of this process for temporary files; '' if nothing is."""
    try:
        used = tempfile.gettempdir()
    except FileNotFoundError:
        return "there is no folder that this process can write to; set TMPDIR"
    wanted = os.environ.get("TMPDIR", "")
    if wanted and os.path.abspath(wanted) != used:
        return f"TMPDIR is {wanted!r}, to which this process cannot write"
    return ""


def _read_file(path: str) -> dict[str, str]:
    from dotenv import dotenv_values  # late: most commands of the command line do not need it

    try:
        return {name: value for name, value in dotenv_values(path).items() if value is not None}
    except OSError as error:
        raise BadSettings(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadSettings(f"{path}: is not text in UTF-8") from None


def _read_switch(text: str) -> bool:
    if text.lower() in ("on", "true", "yes", "1"):
        return True
    if text.lower() in ("off", "false", "no", "0"):
        return False
    raise ValueError(f"{text!r} is not a switch; use on or off")


def _number_reader(
    convert: Callable[[str], N], kind: str, fits: Callable[[N], bool], bounds: str
) -> Callable[[str], N]:
    def read(text: str) -> N:
        try:
            number = convert(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {kind}") from None
        if not fits(number):
            raise ValueError(f"must be {bounds}")
        return number

    return read


_read_whole = _number_reader(int, "a whole number", lambda number: number >= 1, "at least 1")
_read_whole_or_zero = _number_reader(int, "a whole number", lambda number: number >= 0, "at least 0")
_read_days = _number_reader(int, "a whole number", lambda number: 0 <= number <= 36_500, "from 0 to 36500 days")
_read_deadline = _number_reader(int, "a whole number", lambda number: 1 <= number <= 36_500, "from 1 to 36500 days")
_read_weight = _number_reader(float, "a number", lambda number: 0.01 <= number <= 1000, "from 0.01 to 1000")
_read_seconds = _number_reader(
    float,
    "a number of seconds",
    lambda number: 0 < number < 10_000_000,
    "more than 0 and less than 10000000 seconds",
)
_read_seconds_or_zero = _number_reader(
    float,
    "a number of seconds",
    lambda number: 0 <= number < 10_000_000,
    "at least 0 and less than 10000000 seconds",
)


def _read_euro(text: str) -> int:
    try:
        amount = Decimal(text) * NANO
    except ArithmeticError:
        raise ValueError(f"{text!r} is not an amount in euro") from None
    if not amount.is_finite() or not 0 <= amount <= 1_000_000 * NANO or amount != int(amount):
        raise ValueError(f"{text!r} must be from 0 to 1000000 euro with at most nine decimals")
    return int(amount)


def _read_pairs(text: str, allowed: tuple[str, ...], read: Callable[[str], T]) -> dict[str, T]:
    pairs: dict[str, T] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in allowed or not equals:
            raise ValueError(f"{part.strip()!r} is not one of {', '.join(f'{a}=…' for a in allowed)}")
        pairs[name] = read(value.strip())
    return pairs


def _read_operator_token(text: str) -> str:
    if len(text) < SHORTEST_TOKEN:
        raise ValueError(f"must have at least {SHORTEST_TOKEN} random characters (openssl rand -base64 32)")
    return text


def _read_operator_tokens(text: str) -> dict[str, str]:
    """Reads the operators' tokens. Its messages never repeat a token."""
    tokens: dict[str, str] = {}
    for part in text.split(","):
        name, equals, token = part.strip().partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9._@-]{1,40}", name) or name == "operator" or name in tokens:
            raise ValueError("must be name=token,name=token, with unique names; the name operator is reserved")
        if len(token) < SHORTEST_TOKEN or token in tokens.values():
            raise ValueError(f"the token of {name!r} must have at least {SHORTEST_TOKEN} characters and be unique")
        tokens[name] = token
    return tokens


def _read_oidc_operators(text: str) -> tuple[str, ...]:
    entries = tuple(part.strip() for part in text.split(","))
    for entry in entries:
        if not (is_email(entry) or re.fullmatch(r"[^\s=]+=.+", entry)):
            raise ValueError(f"{entry!r} is neither an e-mail address nor claim=value")
    return tuple(entry if "=" in entry else entry.lower() for entry in entries)


def _find_oidc_faults(values: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    given = {name for name, text in environ.items() if name.startswith("GATEWAY_OIDC_") and text.strip()}
    if not values.get("oidc_trust_email"):
        given.discard("GATEWAY_OIDC_TRUST_EMAIL")
    if not given:
        return []
    needed = ("GATEWAY_OIDC_ISSUER", "GATEWAY_OIDC_CLIENT_ID")
    wrong = [f"{name}: is missing; sign-in with OpenID Connect needs it" for name in needed if name not in given]
    if not given & {"GATEWAY_OIDC_CLIENT_SECRET", "GATEWAY_OIDC_CLIENT_SECRET_FILE"}:
        wrong.append("GATEWAY_OIDC_CLIENT_SECRET: is missing; set it, or GATEWAY_OIDC_CLIENT_SECRET_FILE")
    if values.get("oidc_issuer", "").startswith("http:") and not values.get("allow_private_addresses"):
        wrong.append("GATEWAY_OIDC_ISSUER: must begin with https://")
    return wrong


def _plan_reader(default: Mapping[str, T], read: Callable[[str], T]) -> Callable[[str], dict[str, T]]:
    return lambda text: {**default, **_read_pairs(text, PLANS, read)}


def _read_header_value(text: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise ValueError("must be ASCII characters without spaces")
    return text


def _choice_reader(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return text.lower()

    return read


def _read_regions(text: str) -> tuple[str, ...]:
    regions = tuple(part.strip() for part in text.split(","))
    if not all(re.fullmatch(r"[a-z0-9-]{1,32}", region) for region in regions):
        raise ValueError("must be names such as fr-par,nl-ams, of a-z, 0-9 and -")
    return regions


def _read_namespace(text: str) -> str:
    if len(text) > 63 or not re.fullmatch(_LABEL, text):
        raise ValueError(f"{text!r} is not a namespace of Kubernetes, such as capsule-apps")
    return text


def _read_object_name(text: str) -> str:
    if len(text) > 253 or not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", text):
        raise ValueError(f"{text!r} is not a name of an object of Kubernetes, such as fast.example-1")
    return text


def _read_networks(text: str) -> tuple[str, ...]:
    return tuple(str(ipaddress.ip_network(part.strip())) for part in text.split(","))


def _read_annotations(text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError:
        raise ValueError('must be a JSON object of texts, such as {"example.com/name": "value"}') from None


def _read_claim_idle(text: str) -> float:
    if (seconds := _read_seconds(text)) < SHORTEST_CLAIM_IDLE_SECONDS:
        raise ValueError(f"must be at least {SHORTEST_CLAIM_IDLE_SECONDS:g} seconds, twice the budget of one delivery")
    return seconds


def _read_encryption_key(text: str) -> str:
    if any(len(key.strip()) < 32 for key in text.split(",")):
        raise ValueError("must have at least 32 random characters (openssl rand -base64 32)")
    return text


_BY_TYPE: dict[Any, Callable[[str], Any]] = {bool: _read_switch, int: _read_whole, float: _read_seconds}
_READERS: dict[str, Callable[[str], Any]] = {
    "redis_url": addresses.read_redis_url,
    "redis_wait": _read_whole_or_zero,
    "account_grace": _read_days,
    "storage_url": addresses.read_storage_url,
    "base_url": addresses.read_base_url,
    "api_url": addresses.read_base_url,
    "provider_url": addresses.read_provider_url,
    "provider_key": _read_header_value,
    "apps_domain": addresses.read_domain,
    "apps_url": addresses.read_apps_url,
    "example_url": addresses.read_link,
    "encryption_key": _read_encryption_key,
    "ca_file": addresses.read_certificates,
    "provider_timeouts": lambda text: ProviderTimeouts(
        **_read_pairs(text, ("connect", "first", "idle", "total"), _read_seconds)
    ),
    "provider_concurrency": _read_whole_or_zero,
    "provider_wait": _read_seconds_or_zero,
    "provider_weights": _plan_reader(Settings().provider_weights, _read_weight),
    "provider_rate": lambda text: ProviderRate(**_read_pairs(text, ("requests", "tokens"), _read_whole)),
    "prices_file": read_prices,
    "regions": _read_regions,
    "rate_limits": lambda text: RateLimits(**_read_pairs(text, ("app", "user"), _read_whole)),
    "deploy_quotas": _plan_reader(Settings().deploy_quotas, _read_whole),
    "previews": _plan_reader(Settings().previews, _read_whole),
    "app_limits": _plan_reader(Settings().app_limits, _read_whole),
    "build_cache": _read_whole_or_zero,
    "app_pods": _plan_reader(Settings().app_pods, _read_whole),
    "app_data": _plan_reader(Settings().app_data, _read_whole),
    "app_sleep": lambda text: _read_pairs(text, PLANS, _read_seconds_or_zero),
    "daily_caps": _plan_reader(Settings().daily_caps, _read_euro),
    "operator_token": _read_operator_token,
    "operator_tokens": _read_operator_tokens,
    "oidc_issuer": addresses.read_issuer,
    "oidc_operators": _read_oidc_operators,
    "probe_url": addresses.read_probe_url,
    "probe_check_url": addresses.read_url,
    "certificate_address": addresses.read_host_port,
    "dns": addresses.read_resolvers,
    "acme": addresses.read_acme,
    "finding_deadlines": lambda text: {
        **Settings().finding_deadlines,
        **_read_pairs(text, ("red", "yellow"), _read_deadline),
    },
    "smtp_url": addresses.read_smtp_url,
    "smtp_url_file": addresses.read_smtp_url_file,
    "mail_from": addresses.read_mail_from,
    "webhook_claim_idle": _read_claim_idle,
    "build_registries": addresses.read_build_registries,
    "deploy_engine": _choice_reader("local", "external"),
    "apps_engine": _choice_reader("local", "kubernetes"),
    "kubernetes_namespace": _read_namespace,
    "kubernetes_ingress_class": _read_object_name,
    "kubernetes_storage_class": _read_object_name,
    "kubernetes_runtime_class": _read_object_name,
    "kubernetes_ingress_namespace": _read_namespace,
    "kubernetes_tls_issuer": _read_object_name,
    "kubernetes_exclude": _read_networks,
    "kubernetes_ingress_annotations": _read_annotations,
    "apps_listen": addresses.read_host_port,
    "trusted_proxies": addresses.read_trusted_proxies,
    "upstream": addresses.read_upstream,
    "log_level": _choice_reader("debug", "info", "warning", "error"),
    "log_format": _choice_reader("json", "text"),
}
