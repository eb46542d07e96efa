"""What GATEWAY_REDIS_URL may say, and a primary that Sentinel replaces."""

import pytest

from gateway.errors import BackboneUnavailable
from gateway.store import scripts
from gateway.store.client import Store
from gateway.store.servers import Node, parse
from tests.support.polling import wait_until
from tests.support.redis_servers import BINARIES, replicated, sentinels


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://localhost", "must begin with redis://"),
        ("redis://localhost:port", "port between 1 and 65535"),
        ("redis://localhost:99999", "port between 1 and 65535"),
        ("redis://localhost?socket_timeout=abc", "wrong option"),
        ("redis://localhost?colour=red", "does not know: colour"),
        ("redis+cluster://", "must name a host"),
        ("redis+cluster://a,,b", "must name a host"),
        ("redis+cluster://a/3", "only one"),
        ("redis+sentinel://a:26379", "the name of the service"),
    ],
)
def test_a_wrong_address_is_explained(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        parse(url)
    assert "secret" not in str(raised.value)


def test_nodes_have_their_usual_ports() -> None:
    assert parse("redis+cluster://a,b:7000,[::1]").nodes == [Node("a", 6379), Node("b", 7000), Node("::1", 6379)]
    assert parse("redis+sentinel://a,b:1/main").nodes == [Node("a", 26379), Node("b", 1)]


def test_credentials_and_options_hold_for_every_node() -> None:
    servers = parse("rediss+cluster://me:secret@a,b?ssl_ca_certs=/ca.pem")
    assert servers.options == {"username": "me", "password": "secret", "ssl": True, "ssl_ca_certs": "/ca.pem"}


@pytest.mark.parametrize("name", BINARIES)
async def test_sentinel_names_the_new_primary(name: str) -> None:
    with replicated(name) as (primary, replica), sentinels(primary, name=name) as url:
        store = Store(url)
        try:

            async def passes() -> bool:
                try:
                    await scripts.count(store, "{p00}:tests", "hash", 60, {"calls": 1})
                except BackboneUnavailable:
                    return False
                return await store.check_writes() == (1, [])

            await wait_until(passes, 10)
            primary.kill()
            assert not await passes()
            await wait_until(passes, 20, 0.1)
            with replica.client() as client:
                assert int(client.hget("{p00}:tests", "calls") or 0) >= 1  # it was replicated, or written since
        finally:
            await store.close()
