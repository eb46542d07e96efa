"""Servers on ports that other programs take."""

import socket

from tests.support.redis_servers import RedisServer


def test_a_server_starts_although_its_port_is_taken() -> None:
    first, second = RedisServer("valkey"), RedisServer("redis")
    try:
        with socket.socket() as other:
            other.bind(("127.0.0.1", first.port))
            other.listen()
            first.start()
            assert first.port != other.getsockname()[1]
        second.port = first.port
        second.start()
        assert first.port != second.port
        for server in (first, second):
            with server.client() as client:
                assert client.ping()
    finally:
        first.stop()
        second.stop()
