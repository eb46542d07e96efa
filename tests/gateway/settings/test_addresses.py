"""Invalid addresses and files end the start, with a message that names the variable."""

from pathlib import Path
from typing import Any

import pytest

from gateway.settings import BadSettings, ProviderRate, load
from tests.support.folders import as_ordinary_user, passable_folder


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://localhost", "must begin with redis://"),
        ("redis://localhost:99999", "port between 1 and 65535"),
        ("redis://:secret@localhost:1x", "port between 1 and 65535"),
        ("redis://", "must name a host"),
        ("redis://a:1,b:2", "several hosts"),
        ("redis://localhost/main", "the number of a database"),
        ("unix://", "must name a socket"),
        ("redis://localhost?socket_timeout=abc", "invalid option"),
        ("rediss://localhost?ssl_ca_certs=/nowhere.pem", "ssl_ca_certs that does not exist"),
        (f"rediss://localhost?ssl_ca_certs={__file__}", "contains no certificates"),
        (f"rediss://localhost?ssl_certfile={__file__}", "must name a certificate"),
        ("redis://localhost?color=red", "does not support: color"),
        ("redis+cluster://a,,b", "must name a host"),
        ("redis+cluster://a/3", "only one"),
        ("redis+sentinel://a:26379", "the name of the service"),
    ],
)
def test_an_invalid_address_of_redis_is_explained(url: str, message: str) -> None:
    with pytest.raises(BadSettings, match=f"^GATEWAY_REDIS_URL: .*{message}") as raised:
        load({"GATEWAY_REDIS_URL": url})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["BASE_URL", "PROVIDER_URL", "PROBE_CHECK_URL", "APPS_URL"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://me:secret@x:abc/{host}", "port between 1 and 65535"),
        ("https://x:0/{host}", "port between 1 and 65535"),
        ("ftp://me:secret@x/{host}", "an address such as"),
        ("https://x y/{host}", "an address such as"),
        ("https://a..b/{host}", "an address such as"),
        (f"https://{'a' * 64}.example.com/{{host}}", "an address such as"),
        ("https://[::1/{host}", "IPv6"),
    ],
)
def test_an_invalid_address_is_explained_and_not_repeated(name: str, text: str, message: str) -> None:
    with pytest.raises(BadSettings, match=f"^GATEWAY_{name}: .*{message}") as raised:
        load({f"GATEWAY_{name}": text})
    assert "secret" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for text in ("nothing", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----"):
        (path := tmp_path / "ca.pem").write_text(text)
        with pytest.raises(BadSettings, match=r"^GATEWAY_CA_FILE: .* contains no certificates"):
            load({"GATEWAY_CA_FILE": str(path)})
    (tmp_path / "bytes").write_bytes(b"GATEWAY_DRAIN=\xff")
    with pytest.raises(BadSettings, match="bytes: is not text"):
        load(env_file=str(tmp_path / "bytes"))
    with passable_folder() as folder:
        (folder / "locked").touch(mode=0)
        with as_ordinary_user(), pytest.raises(BadSettings, match="locked: cannot be read: Permission denied"):
            load(env_file=str(folder / "locked"))


VALKEYS = ("valkey", "valkeys", "valkey+cluster", "valkeys+sentinel")
UPSTREAMS = ("127.0.0.1:8000", "gateway:8000", "unix//run/capsule/gateway.sock")
REGISTRIES = "https://a:secret@npm.example.com"


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        *(("REDIS_URL", f"{scheme}://a/0", f"{scheme.replace('valkey', 'redis')}://a/0") for scheme in VALKEYS),
        ("DNS", "192.0.2.1:53", "192.0.2.1:53"),
        ("DNS", " 192.0.2.1:53 , [2001:db8::1]:5353 ", "192.0.2.1:53,[2001:db8::1]:5353"),
        ("ACME", "", ""),
        ("ACME", "Internal", "internal"),
        ("ACME", "https://acme.example.com/directory", "https://acme.example.com/directory"),
        *(("UPSTREAM", text, text) for text in UPSTREAMS),
        ("TRUSTED_PROXIES", "private", "private"),
        ("TRUSTED_PROXIES", "off", "off"),
        ("TRUSTED_PROXIES", "192.0.2.7, 10.0.0.0/8,::1", "192.0.2.7/32 10.0.0.0/8 ::1/128"),
        (
            "BUILD_REGISTRIES",
            f" npm={REGISTRIES}/ , pip=http://10.1.2.3:8080/simple https://files.example.com",
            {"npm": (REGISTRIES,), "pip": ("http://10.1.2.3:8080/simple", "https://files.example.com")},
        ),
        ("PROVIDER_RATE", "requests=600,tokens=1000000", ProviderRate(600, 1_000_000)),
        ("PROVIDER_RATE", " tokens=7 ", ProviderRate(0, 7)),
        ("PROVIDER_RATE", "", None),
    ],
)
def test_a_valid_text(name: str, text: str, kept: Any) -> None:
    assert getattr(load({f"GATEWAY_{name}": text}), name.lower()) == kept


# By variable: how the message begins, and invalid texts.
INVALID: dict[str, tuple[str, list[str]]] = {
    "EXAMPLE_URL": ("", ["javascript:alert(1)", "https://me:secret@x", "//x", 'https://x"y z', "data:text/html,x"]),
    **dict.fromkeys(
        ("BASE_URL", "API_URL", "PROVIDER_URL"), (r".*without \? and #", ["https://example.com/v1?version=2"])
    ),
    "PROVIDER_KEY": ("must be ASCII", ["secret words", "secret ü", "secret\nbreak"]),
    "PROVIDER_RATE": ("", ["600", "requests=0", "requests=-1", "tokens=1e6", "minutes=1", "requests"]),
    "DNS": (
        ".* is not address:port",
        ["192.0.2.1", "resolver:53", "192.0.2.1:0", "192.0.2.1:53,", "2001:db8::1", "[x]:53"],
    ),
    "ACME": ("must be", ["on", "letsencrypt", "http://acme.example.com", "https://", "https://a b"]),
    "UPSTREAM": ("", ["unix/a.sock", "unix//a b", "unix//", f"unix//{'x' * 107}", "gateway", "unix:/a"]),
    "TRUSTED_PROXIES": (
        ".* is not private, off, or networks",
        ["on", "10.0.0.1/8", "10.0.0.0/8;x", "proxy.example.com", "10.0.0.0/8,"],
    ),
    "BUILD_REGISTRIES": (
        "must ",
        [
            REGISTRIES,
            "npm=",
            f"npm={REGISTRIES},npm=https://npm.example.com",
            "npm=ftp://a:secret@npm.example.com",
            "npm=https://a:secret@[::1]:4873",
            "npm=https://a:secret@münchen.example.com",
            f"npm={REGISTRIES}:99999",
            "npm=" + " ".join([REGISTRIES] * 17),
        ],
    ),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in INVALID for text in INVALID[name][1]])
def test_an_invalid_text_is_explained_without_secrets(name: str, text: str) -> None:
    with pytest.raises(BadSettings, match=f"^GATEWAY_{name}: {INVALID[name][0]}") as raised:
        load({f"GATEWAY_{name}": text})
    assert "secret" not in str(raised.value)
