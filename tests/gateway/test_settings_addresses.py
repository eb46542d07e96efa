"""Addresses and files that cannot be right stop the start, with one message that names the variable."""

from pathlib import Path

import pytest

from gateway.settings import BadSettings, load


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://localhost", "must begin with redis://"),
        ("redis://localhost:port", "port between 1 and 65535"),
        ("redis://localhost:99999", "port between 1 and 65535"),
        ("redis://:secret@localhost:1x", "port between 1 and 65535"),
        ("redis://", "must name a host"),
        ("redis://a:1,b:2", "several hosts"),
        ("redis://localhost/main", "the number of a database"),
        ("unix://", "must name a socket"),
        ("redis://localhost?socket_timeout=abc", "wrong option"),
        ("rediss://localhost?ssl_cert_reqs=maybe", "wrong option"),
        ("rediss://localhost?ssl_ca_certs=/nowhere.pem", "ssl_ca_certs that does not exist"),
        ("redis://localhost?colour=red", "does not know: colour"),
        ("redis+cluster://", "must name a host"),
        ("redis+cluster://a,,b", "must name a host"),
        ("redis+cluster://a/3", "only one"),
        ("redis+sentinel://a:26379", "the name of the service"),
    ],
)
def test_a_wrong_address_of_redis_is_explained(url: str, message: str) -> None:
    with pytest.raises(BadSettings, match=f"^GATEWAY_REDIS_URL: .*{message}") as raised:
        load({"GATEWAY_REDIS_URL": url})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["valkey", "valkeys", "valkey+cluster", "valkeys+sentinel"])
def test_valkey_is_another_word_for_redis(scheme: str) -> None:
    settings = load({"GATEWAY_REDIS_URL": f"{scheme}://a/0"})
    assert settings.redis_url == f"{scheme.replace('valkey', 'redis')}://a/0"


@pytest.mark.parametrize("text", ["nothing", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----"])
def test_certificates_that_are_none(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "ca.pem").write_text(text)
    with pytest.raises(BadSettings, match=r"^GATEWAY_CA_FILE: .* holds no certificates"):
        load({"GATEWAY_CA_FILE": str(path)})


@pytest.mark.parametrize("name", ["GATEWAY_BASE_URL", "GATEWAY_API_URL"])
def test_a_port_that_is_none(name: str) -> None:
    with pytest.raises(BadSettings, match=f"^{name}: .* port"):
        load({name: "http://x:abc"})
