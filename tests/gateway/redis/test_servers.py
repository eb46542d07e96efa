"""Addresses in GATEWAY_REDIS_URL."""

from pathlib import Path

from gateway.redis.servers import Node, parse
from gateway.settings import load


def test_the_ca_file_applies_unless_the_address_names_another(tmp_path: Path) -> None:
    own, other = tmp_path / "a ca.pem", tmp_path / "other.pem"
    own.touch()
    other.touch()
    assert "ssl_ca_certs" not in parse("redis://a", str(own)).options
    for scheme in ("rediss", "rediss+cluster", "rediss+sentinel"):
        assert parse(f"{scheme}://a/0?protocol=2", str(own)).options["ssl_ca_certs"] == str(own)
        assert parse(f"{scheme}://a/0?ssl_ca_certs={other}", str(own)).options["ssl_ca_certs"] == str(other)


def test_nodes_have_default_ports_and_credentials_apply_to_all(tmp_path: Path) -> None:
    assert parse("redis+cluster://a,b:7000,[::1]").nodes == [Node("a", 6379), Node("b", 7000), Node("::1", 6379)]
    assert parse("redis+sentinel://a,b:1/main").nodes == [Node("a", 26379), Node("b", 1)]
    assert load({"GATEWAY_REDIS_URL": "redis+cluster://a,[::1]:7000"}).redis_url == "redis+cluster://a,[::1]:7000"
    (ca := tmp_path / "ca.pem").touch()
    servers = parse(f"rediss+cluster://me:secret@a,b?ssl_ca_certs={ca}")
    assert servers.options == {"username": "me", "password": "secret", "ssl": True, "ssl_ca_certs": str(ca)}
