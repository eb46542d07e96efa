"""Parses GATEWAY_REDIS_URL and makes the clients for it.

    redis://[[user]:password@]host:port/db            one server; rediss:// with TLS, unix://path?db=0 for a socket
    redis+cluster://[[user]:password@]host:port,…     Redis Cluster, by one or more of its nodes
    redis+sentinel://[[user]:password@]host:port,…/service   the primary that these Sentinels name

`rediss+cluster://` and `rediss+sentinel://` use TLS. The query has redis-py's options, such as `ssl_ca_certs`. The
options `sentinel_username` and `sentinel_password` authenticate to the Sentinels; without them, no password is sent.
"""

from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec
from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError
from redis.maint_notifications import MaintNotificationsConfig

from gateway.redis.errors import MappedClient
from gateway.redis.primary import Sentinels
from gateway.settings import split_hosts

CLUSTER_PORT, SENTINEL_PORT = 6379, 26379

# Only Redis's paid versions send maintenance notifications. The others log an error for each connection.
NO_NOTIFICATIONS = MaintNotificationsConfig(enabled=False)

# Errors of a server that accepts no writes. As `retry_on_error` without retries, they only close the connection: its
# address may belong to a new primary now.
NOT_PRIMARY: list[type[Exception]] = [ReadOnlyError, MasterDownError, BusyLoadingError]


class Node(NamedTuple):
    host: str
    port: int


class RedisServers(msgspec.Struct, frozen=True):
    """The servers in an address. Without a single server, `url` has what all share: credentials, database, options."""

    kind: Literal["single", "cluster", "sentinel"]
    url: str
    nodes: list[Node]  # of the cluster, or the Sentinels
    service: str = ""  # the name of the service at the Sentinels

    @property
    def options(self) -> dict[str, Any]:
        """Returns redis-py's options for credentials, database and TLS."""
        options = dict(parse_url(self.url))
        for name in ("host", "port", "sentinel_username", "sentinel_password"):
            options.pop(name, None)
        if self.kind != "single" and options.pop("connection_class", None) is not None:
            options["ssl"] = True
        return options

    def client(
        self, timeout: float | None, connect_timeout: float, connections: int, sentinels: Sentinels | None = None
    ) -> Any:
        """Returns a client of the server, or of the primary that the Sentinels name. Times are in seconds.

        Several clients can share `sentinels`, the result of `sentinels()`. The client retries nothing: a command
        without an answer may have run, and its caller must know.
        """
        options = {
            **_client_options(timeout, connect_timeout),
            "max_connections": connections,
            "retry_on_error": NOT_PRIMARY,
        }
        if sentinels is not None:
            return sentinels.master_for(self.service, MappedClient, **self.options, **options)
        return MappedClient.from_url(self.url, **options)

    def node_client(self, host: str, port: int, connect_timeout: float) -> Any:
        """Returns a client of one node of the cluster, without a deadline for commands and without retries.

        It raises redis-py's errors.
        """
        shared = {name: value for name, value in self.options.items() if name != "db"}
        return Redis(host=host, port=port, **_client_options(None, connect_timeout), **shared)

    def sentinels(self, timeout: float) -> Sentinels | None:
        """Returns a client that asks the Sentinels for the primary, or None without Sentinels."""
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
        return Sentinels(  # type: ignore[no-untyped-call]
            self.nodes, sentinel_kwargs={**tls, **login}
        )


def parse(url: str, ca_file: str = "") -> RedisServers:
    """Parses an address that `gateway/settings/addresses.py` has checked.

    `ca_file` has certificates to trust beside the public ones, unless the address names others.
    """
    parts = split_hosts(url)
    scheme, _, kind = parts.scheme.partition("+")
    query = parts.query
    if ca_file and scheme == "rediss" and "ssl_ca_certs=" not in query:
        query = "&".join(filter(None, [query, urlencode({"ssl_ca_certs": ca_file})]))
    if not kind:
        return RedisServers("single", urlunsplit((scheme, parts.netloc, parts.path, query, "")), [])
    credentials, at, hosts = parts.netloc.rpartition("@")
    default_port = CLUSTER_PORT if kind == "cluster" else SENTINEL_PORT
    nodes = [_node(host, default_port) for host in hosts.split(",")]
    shared = urlunsplit((scheme, f"{credentials}{at}{_text(nodes[0])}", "", query, ""))
    if kind == "cluster":
        return RedisServers("cluster", shared, nodes)
    return RedisServers("sentinel", shared, nodes, parts.path.strip("/"))


def _node(host_and_port: str, default_port: int) -> Node:
    parts = urlsplit(f"//{host_and_port}")
    return Node(parts.hostname or "localhost", parts.port or default_port)


def _text(node: Node) -> str:
    return f"[{node.host}]:{node.port}" if ":" in node.host else f"{node.host}:{node.port}"


def _client_options(timeout: float | None, connect_timeout: float) -> dict[str, Any]:
    return {
        "decode_responses": True,
        "encoding_errors": "replace",  # one entry that is not UTF-8 must not stop the reading of all others
        "socket_timeout": timeout,
        "socket_connect_timeout": connect_timeout,
        "retry": Retry(NoBackoff(), 0),
        "maint_notifications_config": NO_NOTIFICATIONS,
    }
