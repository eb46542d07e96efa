"""Invalid addresses and files end the start, with a message that names the variable."""

from pathlib import Path

import pytest

from gateway.settings import BadSettings, load
from tests.support.folders import as_ordinary_user, passable_folder


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
        ("redis://localhost?socket_timeout=abc", "invalid option"),
        ("rediss://localhost?ssl_cert_reqs=maybe", "invalid option"),
        ("rediss://localhost?ssl_ca_certs=/nowhere.pem", "ssl_ca_certs that does not exist"),
        (f"rediss://localhost?ssl_ca_certs={__file__}", "contains no certificates"),
        (f"rediss://localhost?ssl_certfile={__file__}", "must name a certificate"),
        ("redis://localhost?color=red", "does not support: color"),
        ("redis+cluster://", "must name a host"),
        ("redis+cluster://a,,b", "must name a host"),
        ("redis+cluster://a/3", "only one"),
        ("redis+sentinel://a:26379", "the name of the service"),
    ],
)
def test_an_invalid_address_of_redis_is_explained(url: str, message: str) -> None:
    with pytest.raises(BadSettings, match=f"^GATEWAY_REDIS_URL: .*{message}") as raised:
        load({"GATEWAY_REDIS_URL": url})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["valkey", "valkeys", "valkey+cluster", "valkeys+sentinel"])
def test_addresses_may_begin_with_valkey(scheme: str) -> None:
    settings = load({"GATEWAY_REDIS_URL": f"{scheme}://a/0"})
    assert settings.redis_url == f"{scheme.replace('valkey', 'redis')}://a/0"


@pytest.mark.parametrize("text", ["nothing", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----"])
def test_files_without_certificates(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "ca.pem").write_text(text)
    with pytest.raises(BadSettings, match=r"^GATEWAY_CA_FILE: .* contains no certificates"):
        load({"GATEWAY_CA_FILE": str(path)})


@pytest.mark.parametrize(
    "text", ["javascript:alert(1)", "https://me:secret@x", "//x", 'https://x"y z', "data:text/html,x"]
)
def test_the_example_is_a_web_page(text: str) -> None:
    with pytest.raises(BadSettings, match=r"^GATEWAY_EXAMPLE_URL: ") as raised:
        load({"GATEWAY_EXAMPLE_URL": text})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["BASE_URL", "API_URL", "PROVIDER_URL", "PROBE_URL", "PROBE_CHECK_URL", "APPS_URL"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://me:secret@x:abc/{host}", "port between 1 and 65535"),
        ("https://x:0/{host}", "port between 1 and 65535"),
        ("ftp://me:secret@x/{host}", "an address such as"),
        ("https://x y/{host}", "an address such as"),
        ("https:///{host}", "an address such as"),
        ("https://a..b/{host}", "an address such as"),
        (f"https://{'a' * 64}.example.com/{{host}}", "an address such as"),
        ("https://[::1/{host}", "IPv6"),
    ],
)
def test_an_invalid_address_is_explained_and_not_repeated(name: str, text: str, message: str) -> None:
    with pytest.raises(BadSettings, match=f"^GATEWAY_{name}: .*{message}") as raised:
        load({f"GATEWAY_{name}": text})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["BASE_URL", "API_URL", "PROVIDER_URL"])
def test_an_address_for_paths_has_no_query_and_fragment(name: str) -> None:
    with pytest.raises(BadSettings, match=rf"^GATEWAY_{name}: .*without \? and #"):
        load({f"GATEWAY_{name}": "https://example.com/v1?version=2"})


@pytest.mark.parametrize("key", ["two words", "schlüssel", "line\nbreak"])
def test_a_key_that_is_no_header_value_is_not_repeated(key: str) -> None:
    with pytest.raises(BadSettings, match=r"^GATEWAY_PROVIDER_KEY: must be ASCII") as raised:
        load({"GATEWAY_PROVIDER_KEY": key})
    assert key not in str(raised.value)


def test_a_settings_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"GATEWAY_DRAIN=\xff")
    with pytest.raises(BadSettings, match="bytes: is not text"):
        load(env_file=str(tmp_path / "bytes"))
    with passable_folder() as folder:
        (folder / "locked").touch(mode=0)
        with as_ordinary_user(), pytest.raises(BadSettings, match="locked: cannot be read: Permission denied"):
            load(env_file=str(folder / "locked"))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("192.0.2.1:53", "192.0.2.1:53"),
        ("localhost:53", "localhost:53"),
        (" 192.0.2.1:53 , [2001:db8::1]:5353 ", "192.0.2.1:53,[2001:db8::1]:5353"),
    ],
)
def test_addresses_of_resolvers(text: str, kept: str) -> None:
    assert load({"GATEWAY_DNS": text}).dns == kept


@pytest.mark.parametrize("text", ["192.0.2.1", "resolver:53", "192.0.2.1:0", "192.0.2.1:53,", "2001:db8::1", "[x]:53"])
def test_invalid_addresses_of_resolvers(text: str) -> None:
    with pytest.raises(BadSettings, match=r"^GATEWAY_DNS: .* is not address:port"):
        load({"GATEWAY_DNS": text})


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", ""),
        ("Off", ""),
        ("Internal", "internal"),
        ("https://acme.example.com/directory", "https://acme.example.com/directory"),
    ],
)
def test_authorities(text: str, kept: str) -> None:
    assert load({"GATEWAY_ACME": text}).acme == kept


@pytest.mark.parametrize("text", ["on", "letsencrypt", "http://acme.example.com", "https://", "https://a b"])
def test_invalid_authorities(text: str) -> None:
    with pytest.raises(BadSettings, match=r"^GATEWAY_ACME: must be"):
        load({"GATEWAY_ACME": text})


@pytest.mark.parametrize("text", ["unix/a.sock", "unix//a b", "unix//", f"unix//{'x' * 107}", "gateway", "unix:/a"])
def test_an_upstream_is_a_port_or_a_unix_socket(text: str) -> None:
    with pytest.raises(BadSettings, match=r"^GATEWAY_UPSTREAM: "):
        load({"GATEWAY_UPSTREAM": text})
    for valid in ("127.0.0.1:8000", "gateway:8000", "unix//run/capsule/gateway.sock"):
        assert load({"GATEWAY_UPSTREAM": valid}).upstream == valid


def test_registries_are_read_by_name() -> None:
    text = " npm=https://user:pass@npm.example.com/ , pip=http://10.1.2.3:8080/simple https://files.example.com"
    assert load({"GATEWAY_BUILD_REGISTRIES": text}).build_registries == {
        "npm": ("https://user:pass@npm.example.com",),
        "pip": ("http://10.1.2.3:8080/simple", "https://files.example.com"),
    }


@pytest.mark.parametrize(
    "text",
    [
        "https://a:hidden-one@npm.example.com",
        "npm=",
        "npm=https://a:hidden-one@npm.example.com,npm=https://npm.example.com",
        "npm=ftp://a:hidden-one@npm.example.com",
        "npm=https://a:hidden-one@[::1]:4873",
        "npm=https://a:hidden-one@münchen.example.com",
        "npm=https://a:hidden-one@npm.example.com:99999",
        "npm=" + " ".join(["https://a:hidden-one@npm.example.com"] * 17),
    ],
)
def test_messages_about_registries_never_repeat_them(text: str) -> None:
    with pytest.raises(BadSettings, match=r"^GATEWAY_BUILD_REGISTRIES: must ") as failure:
        load({"GATEWAY_BUILD_REGISTRIES": text})
    assert "hidden-one" not in str(failure.value)


def test_trusted_proxies() -> None:
    for text, read in {
        "private": "private",
        "off": "off",
        "192.0.2.7, 10.0.0.0/8,::1": "192.0.2.7/32 10.0.0.0/8 ::1/128",
    }.items():
        assert load({"GATEWAY_TRUSTED_PROXIES": text}).trusted_proxies == read
    for text in ("on", "10.0.0.1/8", "10.0.0.0/8;x", "proxy.example.com", "10.0.0.0/8,"):
        with pytest.raises(BadSettings, match=r"GATEWAY_TRUSTED_PROXIES: .* is not private, off, or networks"):
            load({"GATEWAY_TRUSTED_PROXIES": text})
