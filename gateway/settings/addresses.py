"""Reads the addresses and certificate files among the settings. Every reader raises ValueError with its reason."""

import importlib.util
import ipaddress
import re
import ssl
from collections.abc import Mapping
from email.utils import parseaddr
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

_HOST = re.compile(r"[^.:]{1,63}(\.[^.:]{1,63})*\.?|[0-9a-f.]*:[0-9a-f:.]*(%.+)?")  # a name, an IPv4 or an IPv6 address


def _split(text: str) -> SplitResult:
    """Splits an address. Python's own message would repeat a part of it, which may be a password."""
    try:
        return urlsplit(text)
    except ValueError:
        raise ValueError("must be an address such as https://api.example.com, or http://[::1] with IPv6") from None


def read_url(text: str) -> str:
    """Reads an HTTP address. The messages never repeat it, because it may contain a password."""
    parts = _split(text)
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.hostname or "") or re.search(r"\s", text):
        raise ValueError("must be an address such as https://api.example.com")
    try:
        usable = parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("must have a port between 1 and 65535, or no port")
    return text.rstrip("/")


def is_near(url: str) -> bool:
    """Returns whether the host is one of this machine or its network, as far as its name says."""
    host = urlsplit(url).hostname or ""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith((".localhost", ".local", ".internal", ".svc"))


def read_base_url(text: str) -> str:
    if "?" in text or "#" in text:
        raise ValueError("must be an address without ? and #, because the service appends paths to it")
    return read_url(text)


def read_link(text: str) -> str:
    """Reads an address that pages show to everybody."""
    url = read_url(text)
    if "@" in urlsplit(url).netloc:
        raise ValueError("must not contain credentials, because everybody can see it")
    return url


def read_provider_url(text: str) -> str:
    url = read_base_url(text)
    if "@" in urlsplit(url).netloc:
        raise ValueError("must not contain a user or a password: a provider gets its key, and nothing else")
    return url


def read_issuer(text: str) -> str:
    """Reads the address of an OpenID provider. It is compared exactly, so a slash at its end stays."""
    read_link(text)
    read_base_url(text)
    return text


MAX_REGISTRY_ADDRESSES = 16  # a sandbox holds a socket open for each


def read_build_registries(text: str) -> dict[str, tuple[str, ...]]:
    """Reads npm=URL,pip=URL. A URL may be followed by others, separated by spaces. The messages never repeat them."""
    registries: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        name, _, urls = part.strip().partition("=")
        if name not in ("npm", "pip") or name in registries or not urls.strip():
            raise ValueError("must be npm=URL,pip=URL, of which either may be missing; write a comma in a URL as %2C")
        registries[name] = tuple(map(_read_registry, urls.split()))
    if sum(map(len, registries.values())) > MAX_REGISTRY_ADDRESSES:
        raise ValueError(f"must have at most {MAX_REGISTRY_ADDRESSES} addresses")
    return registries


def _read_registry(text: str) -> str:
    url = read_base_url(text)
    host = urlsplit(url).hostname or ""
    if ":" in host or not re.fullmatch(r"[a-z0-9_.-]*[a-z0-9]", host):
        raise ValueError("must have a name of ASCII letters or an IPv4 address as the host of each registry")
    return url


def read_probe_url(text: str) -> str:
    read_url(text.replace("{app}", "app").replace("{apps_domain}", "example.com"))
    return text


def read_host_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not host:port")
    return text


def read_trusted_proxies(text: str) -> str:
    """Reads `private`, `off`, or networks. Returns the networks in CIDR, with spaces in between."""
    if text in ("private", "off"):
        return text
    try:
        return " ".join(str(ipaddress.ip_network(part.strip())) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{text!r} is not private, off, or networks such as 192.0.2.7,10.0.0.0/8: {error}") from None


def read_upstream(text: str) -> str:
    """Reads host:port, or the absolute path of a Unix socket after `unix/`, as Caddy spells both."""
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        if not re.fullmatch(r"/[\w./-]+", path, re.ASCII) or len(path) > UNIX_CHARACTERS:
            raise ValueError(f"{text!r} is not unix/ and an absolute path, as in unix//run/capsule/gateway.sock")
        return text
    return read_host_port(text)


def split_address(text: str) -> tuple[str, int]:
    """Splits an IP address, or localhost, and its port, as in 192.0.2.1:53 or [2001:db8::1]:53."""
    host, _, port = read_host_port(text).rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    return str(ipaddress.ip_address(host)), int(port)


def read_resolvers(text: str) -> str:
    """Reads the addresses of DNS resolvers. They are no names, because looking those up would need a resolver."""
    servers = [part.strip() for part in text.split(",")]
    for server in servers:
        try:
            split_address(server)
        except ValueError:
            raise ValueError(f"{server!r} is not address:port, as in 192.0.2.1:53 or [2001:db8::1]:53") from None
    return ",".join(servers)


def read_acme(text: str) -> str:
    if text.lower() in ("off", "internal"):
        return "" if text.lower() == "off" else "internal"
    if not text.startswith("https://"):
        raise ValueError("must be off, internal, or the directory's URL, which begins with https://")
    return read_url(text)


def read_domain(text: str) -> str:
    domain = text.lower().strip(".")
    if not domain or any(c not in "abcdefghijklmnopqrstuvwxyz0123456789-.:" for c in domain):
        raise ValueError(f"{text!r} is not a domain name")
    return domain


def read_apps_url(text: str) -> str:
    if "{host}" not in text:
        raise ValueError("must contain {host}, as in https://{host}")
    read_link(text.replace("{host}", "app.example.com"))
    return text.rstrip("/")


UNIX = "unix/"  # before the path of a Unix socket, as Caddy spells it
UNIX_CHARACTERS = 107  # of the path of a Unix socket, which the kernel limits
REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")


def split_hosts(url: str) -> SplitResult:
    """Splits an address like `urlsplit`, which in newer Pythons accepts an IPv6 host only as the first of several."""
    scheme, separator, rest = url.partition("://")
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0]
    return urlsplit(scheme + separator + rest.removeprefix(hosts))._replace(netloc=hosts)


def read_redis_url(text: str) -> str:
    """Returns the address with `redis` in place of `valkey`. `gateway/redis/servers.py` parses it."""
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
        raise ValueError("names several hosts, which needs redis+cluster:// or redis+sentinel://")
    for host in hosts:
        _check_host(host)
    path = parts.path.strip("/")
    if not kind and path and not path.isdecimal():
        raise ValueError("must end with the number of a database, as in redis://host:6379/0")
    if kind == "cluster" and path not in ("", "0"):
        raise ValueError("must not name a database: Redis Cluster has only one")
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
    """Builds a connection without opening it, so that a wrong option is reported at the start."""
    from redis.asyncio.connection import (
        ConnectionPool,
        parse_url,
    )  # here, because most commands of the command line do not use Redis
    from redis.exceptions import RedisError

    try:
        options: dict[str, Any] = dict(parse_url(url))
        for name in ("sentinel_username", "sentinel_password"):
            options.pop(name, None)
        ConnectionPool(**options).make_connection()  # type: ignore[no-untyped-call]
    except TypeError as error:
        unknown = re.search(r"keyword argument '(\w+)'", str(error))
        raise ValueError(f"has an option that redis-py does not support: {unknown[1] if unknown else error}") from None
    except (ValueError, RedisError) as error:
        raise ValueError(f"has an invalid option: {error}") from None
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options and not Path(options[name]).is_file():
            raise ValueError(f"names a file in {name} that does not exist")
    if authorities := options.get("ssl_ca_certs"):
        read_certificates(authorities)
    if certificate := options.get("ssl_certfile"):
        _check_key_pair(certificate, options.get("ssl_keyfile"))


def _check_key_pair(certificate: str, key: str | None) -> None:
    try:  # without a password, OpenSSL would prompt for it
        ssl.create_default_context().load_cert_chain(certificate, key, password="")
    except ssl.SSLError:
        raise ValueError("must name a certificate in ssl_certfile and its key in ssl_keyfile") from None


class SmtpServer(NamedTuple):
    host: str
    port: int
    tls: bool  # from the first byte on; otherwise STARTTLS, if the server offers it
    user: str
    password: str


def split_smtp_url(text: str) -> SmtpServer:
    """Splits the address of a mail server. The messages never repeat it, because it may contain a password."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("smtp", "smtps") or port == 0 or re.search(r"\s", text):
        raise ValueError("must be an address such as smtp://user:password@mail.example.com:587")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError("must end with the host or the port; write / ? and # in a password as %2F %3F and %23")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if bool(user) != bool(password):
        raise ValueError("must have both a user and a password, or neither")
    tls = parts.scheme == "smtps"
    return SmtpServer(host, port or (465 if tls else 587), tls, user, password)


def read_smtp_url(text: str) -> str:
    split_smtp_url(text)
    return text


def read_smtp_url_file(text: str) -> str:
    split_smtp_url(Path(text).read_text().strip())
    return text


def read_mail_from(text: str) -> str:
    _, address = parseaddr(text)
    if not text.isprintable() or not re.fullmatch(r"[^@\s<>\"]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", address):
        raise ValueError("must be an address, as in notices@example.com or Example <notices@example.com>")
    return text


def read_storage_url(text: str) -> str:
    """Reads the address of the storage. The messages never repeat it, because it may contain a password."""
    parts = _split(text)
    if "@" in parts.netloc:
        raise ValueError("must not contain credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead")
    folder = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
    bucket = parts.scheme == "s3" and parts.netloc
    if not (folder or bucket) or parts.query or parts.fragment:
        raise ValueError("must be file:///folder or s3://bucket/prefix")
    return text


def find_kubernetes_fault() -> str:
    """Returns what apps on Kubernetes need and this process lacks, or an empty string."""
    if importlib.util.find_spec("lightkube") is None:
        return "GATEWAY_APPS_ENGINE: kubernetes needs a library: run pip install '.[kubernetes]' in the clone"
    return ""


def find_s3_fault(environ: Mapping[str, str]) -> str:
    """Returns what S3 storage needs and this process lacks, or an empty string. Uses no network."""
    if importlib.util.find_spec("obstore") is None:
        return "s3:// needs a library: run pip install '.[s3]' in the clone"
    # Instead of keys, a platform such as Kubernetes or ECS gives credentials that expire.
    given = ("WEB_IDENTITY_TOKEN_FILE", "CONTAINER_CREDENTIALS_RELATIVE_URI", "CONTAINER_CREDENTIALS_FULL_URI")
    if any(environ.get(f"AWS_{name}") for name in given):
        return ""
    missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not environ.get(name)]
    return f"s3:// also needs {' and '.join(missing)}" if missing else ""


def read_certificates(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError(f"{text!r} is not a file")
    try:
        ssl.create_default_context(cafile=text)
    except ssl.SSLError:
        raise ValueError(f"{text!r} contains no certificates in PEM format") from None
    return text
