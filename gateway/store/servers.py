"""Where Redis is: what GATEWAY_REDIS_URL says, and the clients it leads to.

    redis://[[user]:password@]host:port/db            one server; rediss:// with TLS, unix://path?db=0 for a socket
    redis+cluster://[[user]:password@]host:port,…     Redis Cluster, by one or more of its nodes
    redis+sentinel://[[user]:password@]host:port,…/service   the primary that these Sentinels name

`rediss+cluster://` and `rediss+sentinel://` use TLS. The query holds redis-py's options, such as `ssl_ca_certs`;
`sentinel_username` and `sentinel_password` log in to the Sentinels, which get no password otherwise.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import msgspec
from redis.asyncio import Redis
from redis.asyncio.connection import ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError
from redis.maint_notifications import MaintNotificationsConfig

from gateway.settings import REDIS_SCHEMES

CLUSTER_PORT, SENTINEL_PORT = 6379, 26379

# Of maintenance, which only Redis's paid versions send: the others log a refusal for each connection.
NO_NOTIFICATIONS = MaintNotificationsConfig(enabled=False)

# Errors of a server that takes no writes. Without retries, naming them as worth one only closes the connection: its
# address may lead to a new primary by now.
NOT_PRIMARY: list[type[Exception]] = [ReadOnlyError, MasterDownError, BusyLoadingError]


class Node(NamedTuple):
    host: str
    port: int


class RedisServers(msgspec.Struct, frozen=True):
    """`url` leads to the one server, or holds what all servers share: scheme, credentials, database, options."""

    kind: Literal["single", "cluster", "sentinel"]
    url: str
    nodes: list[Node]  # of the cluster, or the Sentinels
    service: str = ""  # that the Sentinels know

    @property
    def options(self) -> dict[str, Any]:
        """For redis-py: credentials, database, TLS."""
        options = dict(parse_url(self.url))
        for name in ("host", "port", "sentinel_username", "sentinel_password"):
            options.pop(name, None)
        if self.kind != "single" and options.pop("connection_class", None) is not None:
            options["ssl"] = True
        return options

    def client(
        self, timeout: float | None, connect_timeout: float, connections: int, sentinel: Sentinel | None = None
    ) -> Any:
        """A client of the server, or of the primary that the Sentinels name.

        It has no retries: a command whose answer was lost may have run, and its caller must know.

        `sentinel` is what `sentinel()` returned, for several clients to share.
        """
        options: dict[str, Any] = {
            "decode_responses": True,
            "encoding_errors": "replace",  # one entry that is not UTF-8 must not end the reading of all others
            "socket_timeout": timeout,
            "socket_connect_timeout": connect_timeout,
            "retry": Retry(NoBackoff(), 0),
            "maint_notifications_config": NO_NOTIFICATIONS,
        }
        options |= {"max_connections": connections, "retry_on_error": NOT_PRIMARY}
        if sentinel is not None:
            return sentinel.master_for(self.service, **self.options, **options)
        return Redis.from_url(self.url, **options)

    def node_client(self, host: str, port: int, connect_timeout: float) -> Any:
        """A client of one node of the cluster, without a deadline for commands and without retries."""
        return Redis(
            host=host,
            port=port,
            decode_responses=True,
            encoding_errors="replace",
            socket_timeout=None,
            socket_connect_timeout=connect_timeout,
            retry=Retry(NoBackoff(), 0),
            maint_notifications_config=NO_NOTIFICATIONS,
            **_without_db(self.options),
        )

    def sentinel(self, timeout: float) -> Sentinel | None:
        """What asks the Sentinels for the primary, if there are any."""
        if self.kind != "sentinel":
            return None
        query = dict(parse_url(self.url))
        login = {
            "username": query.get("sentinel_username"),
            "password": query.get("sentinel_password"),
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "decode_responses": True,
        }
        tls = {name: value for name, value in self.options.items() if name.startswith("ssl")}
        return Sentinel(  # type: ignore[no-untyped-call]
            self.nodes, sentinel_kwargs={**tls, **login}
        )


def parse(url: str) -> RedisServers:
    """Raises ValueError with a message for the operator."""
    parts = urlsplit(url)
    if parts.scheme not in REDIS_SCHEMES:
        raise ValueError("must begin with redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://")
    scheme, _, kind = parts.scheme.partition("+")
    if not kind:
        if scheme != "unix":
            _node(parts.netloc.rpartition("@")[2], CLUSTER_PORT)
        _check_options(url)
        return RedisServers("single", url, [])
    credentials, at, hosts = parts.netloc.rpartition("@")
    port = CLUSTER_PORT if kind == "cluster" else SENTINEL_PORT
    nodes = [_node(host, port) for host in hosts.split(",")]
    service = parts.path.strip("/")
    if kind == "cluster":
        if service not in ("", "0"):
            raise ValueError("must name no database: Redis Cluster has only one")
        shared = urlunsplit((scheme, f"{credentials}{at}{_text(nodes[0])}", "", parts.query, ""))
        _check_options(shared)
        return RedisServers("cluster", shared, nodes)
    if not service:
        raise ValueError("must end with the name of the service, as in redis+sentinel://host:26379/service")
    shared = urlunsplit((scheme, f"{credentials}{at}{_text(nodes[0])}", "", parts.query, ""))
    _check_options(shared)
    return RedisServers("sentinel", shared, nodes, service)


def _node(host_and_port: str, default_port: int) -> Node:
    try:
        parts = urlsplit(f"//{host_and_port}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("must have a port between 1 and 65535 after each host") from None
    if not host or port == 0:
        raise ValueError("must name a host, and a port between 1 and 65535, as in redis://host:6379/0")
    return Node(host, port or default_port)


def _text(node: Node) -> str:
    return f"[{node.host}]:{node.port}" if ":" in node.host else f"{node.host}:{node.port}"


def _check_options(url: str) -> None:
    """Builds a client that connects to nothing, so that a wrong option is known at the start."""
    try:
        options: dict[str, Any] = dict(parse_url(url))
        for name in ("sentinel_username", "sentinel_password"):
            options.pop(name, None)
        ConnectionPool(**options).make_connection()  # type: ignore[no-untyped-call]
    except TypeError as error:
        unknown = re.search(r"keyword argument '(\w+)'", str(error))
        raise ValueError(f"has an option that redis-py does not know: {unknown[1] if unknown else error}") from None
    except ValueError as error:
        raise ValueError(f"has a wrong option: {error}") from None


def _without_db(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "db"}
