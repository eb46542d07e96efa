"""All settings, read once from the environment and a `.env` file into one frozen struct.

Nothing else in the project reads the environment. The field `redis_url` holds the variable `GATEWAY_REDIS_URL`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import ssl
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import SplitResult, urlsplit

import msgspec
from dotenv import dotenv_values

NANO = 1_000_000_000  # nano-euro in a euro: money is counted in whole nano-euro
SHORTEST_CLAIM_IDLE = 10.0  # seconds
T = TypeVar("T")
Plan = Literal["free", "starter", "maker", "max"]
PLANS: tuple[Plan, ...] = get_args(Plan)


class BadSettings(Exception):
    """The message has one line for each variable that is wrong."""


class RateLimits(msgspec.Struct, frozen=True):
    app: int = 30
    user: int = 20


class ProviderTimeouts(msgspec.Struct, frozen=True):
    """Seconds."""

    connect: float = 5
    first: float = 30
    idle: float = 30
    total: float = 300


class ProviderRate(msgspec.Struct, frozen=True):
    """A quota of any minute, of all gateways together; 0: none."""

    requests: int = 0
    tokens: int = 0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    redis_url: str = "redis://localhost:6379/0"
    redis_wait: int = 0  # replicas that must have a reservation before its request goes on
    base_url: str = "http://localhost:8000"  # {base_url}: the public address of inference and the API
    api_url: str = ""  # {api_url}: the address in deploy hook URLs; empty: the base URL
    apps_domain: str = "apps.localhost"  # {apps_domain}
    apps_url: str = "https://{host}"  # the address of an app as pages and tools show it

    inference: bool = False  # the runtime switch, until somebody sets it
    provider_url: str = "https://api.scaleway.ai/v1"
    provider_key: str = ""  # the first gate
    provider_key_file: str = ""  # read instead of provider_key, again whenever the provider refuses it
    processing_approved: bool = False  # the second gate; the default until somebody sets the approval
    emergency_off_file: str = "/run/capsule/inference.off"  # if this file exists, inference is off
    provider_timeouts: ProviderTimeouts = ProviderTimeouts()

    provider_concurrency: int = 100  # requests at the provider at once, of all gateways together; 0: no bound
    provider_wait: float = 10  # seconds that a request may wait for its turn at the provider; 0: none waits
    provider_weights: dict[str, float] = msgspec.field(  # shares of accounts by plan while requests wait
        default_factory=lambda: dict.fromkeys(PLANS, 1.0)
    )
    provider_rate: ProviderRate | None = None  # the provider's quota of requests and tokens in any minute

    operator_token: str = ""  # shared by operators; without this and the next, the platform surface is closed
    operator_tokens: dict[str, str] = msgspec.field(default_factory=dict)  # by the operator's name
    allow_private_addresses: bool = False  # development and tests: loopback, plain http
    encryption_key: str = ""  # several, comma separated: the first encrypts, all decrypt
    ca_file: str = ""  # certificates to trust for outgoing TLS, beside the public ones

    registrations_per_day: int = 50
    deploy_quotas: dict[str, int] = msgspec.field(  # deploys per account and UTC day
        default_factory=lambda: {"free": 10, "starter": 50, "maker": 200, "max": 1000}
    )
    app_limits: dict[str, int] = msgspec.field(  # apps that an account may have to create another one itself
        default_factory=lambda: {"free": 1, "starter": 3, "maker": 10, "max": 50}
    )
    rate_limits: RateLimits = RateLimits()  # requests per sliding minute
    daily_caps: dict[str, int] = msgspec.field(  # nano-euro per account and UTC day; the variable is in euro
        default_factory=lambda: {
            "free": NANO // 20,
            "starter": NANO // 2,
            "maker": 2 * NANO,
            "max": 10 * NANO,
        }
    )
    keep_alive: float = 15  # seconds without an event before a keep-alive
    drain: float = 30  # seconds that running streams get after SIGTERM

    probe_interval: float = 60  # seconds between uptime probes of an app
    probe_timeout: float = 10  # seconds
    probe_url: str = "https://{app}.{apps_domain}/"
    probe_check_url: str = ""  # an address that answers whenever the worker has a network; empty: no check
    unhealthy_cooldown: float = 900  # seconds
    certificate_interval: float = 86_400  # seconds
    certificate_address: str = ""  # host:port to connect to instead of the custom domain
    finding_deadlines: dict[str, int] = msgspec.field(  # days from the first scan that reports it
        default_factory=lambda: {"red": 7, "yellow": 30}
    )
    webhook_claim_idle: float = 15  # seconds
    deploy_engine: str = "local"
    canary: float = 30  # seconds
    data_dir: str = "./.capsule"
    storage_url: str = ""  # file:///… or s3://bucket/prefix, with the variables AWS_*; empty: the data folder
    trust_builds: bool = False  # development: builds and start commands run without a sandbox
    account_disk: int = 10_240  # MiB that the releases of an account may take
    apps_listen: str = "127.0.0.1:8080"  # host:port where the worker `sites` serves the hosted apps
    apps_server: str = "auto"  # nginx, embedded, or auto: nginx where it is installed

    log_level: str = "info"
    log_format: str = "json"


def load(environ: Mapping[str, str] | None = None, env_file: str = ".env") -> Settings:
    """Raises BadSettings with one line for each variable that is wrong."""
    if environ is None:
        environ = {**_read_file(env_file), **os.environ}
        # The libraries that speak S3 and OTLP read these from the environment.
        os.environ.update({k: v for k, v in environ.items() if k.startswith(("AWS_", "OTEL_"))})
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for field in msgspec.structs.fields(Settings):
        name = "GATEWAY_" + field.name.upper()
        text = environ.get(name, "").strip()
        if not text:
            continue
        try:
            values[field.name] = _READERS.get(field.name, _BY_TYPE.get(field.type, str))(text)
        except (ValueError, InvalidOperation, OSError) as error:
            wrong.append(f"{name}: {error}")
    if values.get("storage_url", "").startswith("s3:") and (fault := _find_s3_fault(environ)):
        wrong.append(fault)
    if values.get("trust_builds") and not values.get("allow_private_addresses"):
        wrong.append("GATEWAY_TRUST_BUILDS: only for development, with GATEWAY_ALLOW_PRIVATE_ADDRESSES")
    if wrong:
        raise BadSettings("\n".join(wrong))
    settings = Settings(**values)
    return msgspec.structs.replace(settings, api_url=settings.api_url or settings.base_url)


def _read_file(path: str) -> dict[str, str]:
    try:
        return {name: value for name, value in dotenv_values(path).items() if value is not None}
    except OSError as error:
        raise BadSettings(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadSettings(f"{path}: is not text in UTF-8") from None


def _switch(text: str) -> bool:
    if text.lower() in ("on", "true", "yes", "1"):
        return True
    if text.lower() in ("off", "false", "no", "0"):
        return False
    raise ValueError(f"{text!r} is neither on nor off (true, false)")


def _whole(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None
    if not 0 < number < 10_000_000:
        raise ValueError("must be more than 0 seconds")
    return number


def _zero_or(read: Callable[[str], T], zero: T) -> Callable[[str], T]:
    return lambda text: zero if text == "0" else read(text)


def _weight(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not 0.01 <= number <= 1000:
        raise ValueError("must be from 0.01 to 1000")
    return number


def _euro(text: str) -> int:
    try:
        amount = Decimal(text) * NANO
    except InvalidOperation:
        raise ValueError(f"{text!r} is not an amount in euro") from None
    if not amount.is_finite() or amount < 0 or amount != int(amount) or amount > 1_000_000 * NANO:
        raise ValueError(f"{text!r} must be from 0 to 1000000 euro with at most nine decimals")
    return int(amount)


def _pairs(text: str, allowed: tuple[str, ...], read: Callable[[str], T]) -> dict[str, T]:
    pairs: dict[str, T] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in allowed or not equals:
            raise ValueError(f"{part.strip()!r} is not one of {', '.join(f'{a}=…' for a in allowed)}")
        pairs[name] = read(value.strip())
    return pairs


def _operator_tokens(text: str) -> dict[str, str]:
    """No message repeats what may be a token."""
    tokens: dict[str, str] = {}
    for part in text.split(","):
        name, equals, token = part.strip().partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9._@-]{1,40}", name) or name == "operator" or name in tokens:
            raise ValueError("must be name=token,name=token, each with a name of its own; operator is taken")
        if len(token) < 20 or token in tokens.values():
            raise ValueError(f"the token of {name!r} must be at least 20 characters, and nobody else's")
        tokens[name] = token
    return tokens


def _by_plan(default: Mapping[str, T], read: Callable[[str], T]) -> Callable[[str], dict[str, T]]:
    return lambda text: {**default, **_pairs(text, PLANS, read)}


def _url(text: str) -> str:
    """No message repeats the address, which may hold a password."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", text):
        raise ValueError("must be an address such as https://api.example.com")
    try:
        usable = parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("must have a port between 1 and 65535, or none")
    return text.rstrip("/")


def _base_url(text: str) -> str:
    if "?" in text or "#" in text:
        raise ValueError("must be an address without ? and #, because paths are appended to it")
    return _url(text)


def _probe_url(text: str) -> str:
    _url(text.replace("{app}", "app").replace("{apps_domain}", "example.com"))
    return text


def _header_value(text: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise ValueError("must be ASCII characters without spaces")
    return text


REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")


def split_hosts(url: str) -> SplitResult:
    """As `urlsplit`, for several hosts. Newer Pythons refuse an IPv6 address that is not the first of them."""
    scheme, separator, rest = url.partition("://")
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0]
    return urlsplit(scheme + separator + rest.removeprefix(hosts))._replace(netloc=hosts)


def _redis_url(text: str) -> str:
    """The address with `valkey` in place of `redis` is the same. `gateway/redis/servers.py` takes it apart."""
    text = re.sub(r"^valkey(s?)", r"redis\1", text)
    parts = split_hosts(text)
    scheme, _, kind = parts.scheme.partition("+")
    if parts.scheme not in REDIS_SCHEMES:
        raise ValueError("must begin with redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://")
    if scheme == "unix":
        if not parts.path:
            raise ValueError("must name a socket, as in unix:///run/redis.sock")
        _check_redis_options(text)
        return text
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if len(hosts) > 1 and not kind:
        raise ValueError("names several hosts, so it must begin with redis+cluster:// or redis+sentinel://")
    for host in hosts:
        _check_host(host)
    path = parts.path.strip("/")
    if not kind and path and not path.isdecimal():
        raise ValueError("must end with the number of a database, as in redis://host:6379/0")
    if kind == "cluster" and path not in ("", "0"):
        raise ValueError("must name no database: Redis Cluster has only one")
    if kind == "sentinel" and not path:
        raise ValueError("must end with the name of the service, as in redis+sentinel://host:26379/service")
    _check_redis_options(f"{scheme}://host?{parts.query}")
    return text


def _check_host(text: str) -> None:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("must have a port between 1 and 65535 after each host") from None
    if not host or port == 0:
        raise ValueError("must name a host, and may name a port between 1 and 65535, as in redis://host:6379/0")


def _check_redis_options(url: str) -> None:
    """Builds a connection without connecting it, so that a wrong option is known at the start."""
    from redis.asyncio.connection import ConnectionPool, parse_url  # most commands of the command line need no Redis
    from redis.exceptions import RedisError

    try:
        options: dict[str, Any] = dict(parse_url(url))
        for name in ("sentinel_username", "sentinel_password"):
            options.pop(name, None)
        ConnectionPool(**options).make_connection()  # type: ignore[no-untyped-call]
    except TypeError as error:
        unknown = re.search(r"keyword argument '(\w+)'", str(error))
        raise ValueError(f"has an option that redis-py does not know: {unknown[1] if unknown else error}") from None
    except (ValueError, RedisError) as error:
        raise ValueError(f"has a wrong option: {error}") from None
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options and not Path(options[name]).is_file():
            raise ValueError(f"names a file in {name} that does not exist")
    if authorities := options.get("ssl_ca_certs"):
        _certificates(authorities)
    if certificate := options.get("ssl_certfile"):
        _check_key_pair(certificate, options.get("ssl_keyfile"))


def _check_key_pair(certificate: str, key: str | None) -> None:
    try:  # without a password, OpenSSL would ask the terminal for it
        ssl.create_default_context().load_cert_chain(certificate, key, password="")
    except ssl.SSLError:
        raise ValueError("names no certificate with its key in ssl_certfile and ssl_keyfile") from None


def _storage_url(text: str) -> str:
    parts = urlsplit(text)
    if "@" in parts.netloc:  # the message must not show them
        raise ValueError("must hold no credentials; they are in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    folder = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
    bucket = parts.scheme == "s3" and parts.netloc
    if not (folder or bucket) or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is neither file:///folder nor s3://bucket/prefix")
    return text


def _find_s3_fault(environ: Mapping[str, str]) -> str:
    """What the storage misses that needs no network to know."""
    if importlib.util.find_spec("obstore") is None:
        return 'GATEWAY_STORAGE_URL: s3:// needs a library: pip install "capsule-gateway[s3]"'
    # Instead of keys, a platform such as Kubernetes or ECS gives credentials that expire.
    if any(environ.get(f"AWS_{name}") for name in ("WEB_IDENTITY_TOKEN_FILE", "CONTAINER_CREDENTIALS_RELATIVE_URI")):
        return ""
    if environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        return ""
    missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not environ.get(name)]
    return f"GATEWAY_STORAGE_URL: s3:// needs {' and '.join(missing)} too" if missing else ""


def _domain(text: str) -> str:
    domain = text.lower().strip(".")
    if not domain or any(c not in "abcdefghijklmnopqrstuvwxyz0123456789-.:" for c in domain):
        raise ValueError(f"{text!r} is not a domain name")
    return domain


def _apps_url(text: str) -> str:
    if "{host}" not in text:
        raise ValueError(f"{text!r} must contain {{host}}, as in https://{{host}}")
    _url(text.replace("{host}", "app.example.com"))
    return text.rstrip("/")


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return text.lower()

    return read


def _host_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not host:port")
    return text


def _claim_idle(text: str) -> float:
    if (seconds := _seconds(text)) < SHORTEST_CLAIM_IDLE:
        raise ValueError(f"must be at least {SHORTEST_CLAIM_IDLE:g} seconds, twice the budget of one delivery")
    return seconds


def _encryption_key(text: str) -> str:
    if any(len(key.strip()) < 32 for key in text.split(",")):
        raise ValueError("must be at least 32 characters of randomness (openssl rand -base64 32)")
    return text


def _certificates(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError(f"{text!r} is not a file")
    try:
        ssl.create_default_context(cafile=text)
    except ssl.SSLError:
        raise ValueError(f"{text!r} holds no certificates in PEM format") from None
    return text


_BY_TYPE: dict[Any, Callable[[str], Any]] = {bool: _switch, int: _whole, float: _seconds}
_READERS: dict[str, Callable[[str], Any]] = {
    "redis_url": _redis_url,
    "redis_wait": _zero_or(_whole, 0),
    "storage_url": _storage_url,
    "base_url": _base_url,
    "api_url": _base_url,
    "provider_url": _base_url,
    "provider_key": _header_value,
    "apps_domain": _domain,
    "apps_url": _apps_url,
    "encryption_key": _encryption_key,
    "ca_file": _certificates,
    "provider_timeouts": lambda text: ProviderTimeouts(**_pairs(text, ("connect", "first", "idle", "total"), _seconds)),
    "provider_concurrency": _zero_or(_whole, 0),
    "provider_wait": _zero_or(_seconds, 0.0),
    "provider_weights": _by_plan(Settings().provider_weights, _weight),
    "provider_rate": lambda text: ProviderRate(**_pairs(text, ("requests", "tokens"), _whole)),
    "rate_limits": lambda text: RateLimits(**_pairs(text, ("app", "user"), _whole)),
    "deploy_quotas": _by_plan(Settings().deploy_quotas, _whole),
    "app_limits": _by_plan(Settings().app_limits, _whole),
    "daily_caps": _by_plan(Settings().daily_caps, _euro),
    "operator_tokens": _operator_tokens,
    "probe_url": _probe_url,
    "probe_check_url": _url,
    "certificate_address": _host_port,
    "finding_deadlines": lambda text: {**Settings().finding_deadlines, **_pairs(text, ("red", "yellow"), _whole)},
    "webhook_claim_idle": _claim_idle,
    "deploy_engine": _one_of("local", "external"),
    "apps_listen": _host_port,
    "apps_server": _one_of("auto", "nginx", "embedded"),
    "log_level": _one_of("debug", "info", "warning", "error"),
    "log_format": _one_of("json", "text"),
}
