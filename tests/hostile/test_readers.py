"""Readers of what customers and other machines write refuse it in their own words, or take it.

Each round puts pieces of the format together at random, or breaks a good example. The seeds are fixed. `HOSTILE_ROUNDS`
sets the number of rounds of each reader, and `HOSTILE_SEED` another seed.
"""

import contextlib
import gzip
import io
import os
import random
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.accounts.domain_names import check_own_domain
from gateway.accounts.jose.jwk import public_part, read_key, split_document
from gateway.accounts.vault import Vault
from gateway.deploys.archives import Refused, check_tar, pack_zip, unpack
from gateway.deploys.manifest import ManifestError, seal_manifest
from gateway.errors import RequestMalformed
from gateway.monitors.scans import read_scan
from gateway.settings import Settings
from workers.hosting.rules import compile_rules

ROUNDS, SEED = int(os.environ.get("HOSTILE_ROUNDS", "300")), int(os.environ.get("HOSTILE_SEED", "1"))
VAULT = Vault("an-encryption-key-of-32-characters")
BIG = "9" * 5_000
# What many formats do not expect.
ODD = (
    *("", " ", "\t", "\n", "\r\n", "\0", "\x1b[2J", "\x7f", "\ufeff", "\u2028"),
    *("é", "…", "。", "💩", "\ud800", "İ", "ſ"),
    *("0", "-1", "1", "1e999", "1e-999", "nan", "inf", "٣", "²", BIG, "0x" + "f" * 5_000, "9" * 30),
    *("a" * 300, "../" * 50),
    *("null", "true", "[]", "{}", "[" * 2_000, "{a=" * 2_000),
    *('"', "'", "\\", "/", "//", "..", ".", "*", ":", ",", "#", "%", "%00", "%zz", "%ff"),
    *("&", "?", "@", "=", "-", "--", "_", "$", "{{", "}}", "(?", "[[", "]]", ";", "|", "!", "xn--a"),
)


class Reader(NamedTuple):
    read: Callable[[str, Path], Any]
    refuses: tuple[type[BaseException], ...]
    pieces: Sequence[str]
    joined: Sequence[str]  # by one of these
    examples: Sequence[str] = ()


def encode(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def read_rules(text: str, folder: Path) -> None:
    release = Path(tempfile.mkdtemp(dir=folder))
    (release / "files").mkdir()
    for name in ("_redirects", "_headers"):
        (release / "files" / name).write_bytes(encode(text))
    compile_rules(release)


def read_key_set(text: str, folder: Path) -> None:
    for key in split_document(encode(text)):
        read_key(key)
        public_part(key)


TOML = (
    *("=", ".", "[", "]", "{", "}", ",", "\n", '"', "'", '"""', "'''"),
    *("1979-05-27T07:32:00Z", "0b1", "1_0", "x", "# "),
)
MANIFEST_KEYS = (
    *("name", "build", "auth", "dev", "command", "output", "start"),
    *("kind", "url", "audience", "overlap", "secret"),
)
MANIFEST = (
    'name = "notes"\n[build]\ncommand = "make"\noutput = "dist"\n'
    '[auth]\nkind = "jwks"\nurl = "/keys"\naudience = ["a"]\n'
)
JSON = ("{", "}", "[", "]", ":", ",", '"', "\\u0000", '"\\ud800"', "1", "null")
JWKS = (
    '{"keys":[{"kty":"RSA","n":"AQAB","e":"AQAB","kid":"1"},'
    '{"kty":"EC","crv":"P-256","x":"AA","y":"AA","alg":"ES256"}]}'
)
SCAN = '{"findings":[{"cve":"CVE-1","component":"a","severity":"high","fixedIn":"1"}]}'
OSV = (
    '{"results":[{"packages":[{"package":{"name":"a","version":"1"},'
    '"vulnerabilities":[{"id":"x"}],"groups":[{"ids":["x"]}]}]}]}'
)
READERS = {
    "rules": Reader(
        read_rules,
        (),
        (
            *("/", "/a", "/:x", "/*", ":splat", "/b", "301!", "200", "404", "https://a.example"),
            *("X-A: b", "! X-A", "Link: <x>"),
        ),
        (" ", "", "\n", "/", "\n  "),
        [
            "/a/:id /b/:id 301\n/c/* /d/:splat 200\n/* /x 404\n",
            "/*\n  X-A: b\n  ! X-B\n/a\n  Content-Type: text/html\n",
        ],
    ),
    "manifest": Reader(
        lambda text, _: seal_manifest(encode(text), VAULT, allow_private=False),
        (ManifestError,),
        (*TOML, *MANIFEST_KEYS),
        ("", " ", " = ", "\n", "."),
        [MANIFEST],
    ),
    "domains": Reader(
        lambda text, _: check_own_domain(text, Settings()),
        (RequestMalformed,),
        ("xn--", "xn--a", "xn--zca", "a", ".", "example", ".org", "-", "é", "ß", "\u200d", "א", "xn--99999999999"),
        ("", "."),
        ["xn--bcher-kva.example", "例え。テスト"],
    ),
    "key sets": Reader(
        read_key_set, (ValueError, RecursionError), (*JSON, '"kty"', '"RSA"', '"n"'), ("", ":", ","), [JWKS]
    ),
    "scans": Reader(
        lambda text, _: read_scan(encode(text)),
        (RequestMalformed, RecursionError),  # the gateway answers both with 400
        (*JSON, '"findings"', '"matches"', '"results"', '"SchemaVersion"'),
        ("", ":", ","),
        [SCAN, OSV],
    ),
}


def make_texts(reader: Reader, chance: random.Random) -> Iterable[str]:
    for _ in range(ROUNDS):
        if reader.examples and chance.random() < 0.6:
            text = chance.choice(reader.examples)
            for _ in range(chance.randint(1, 3)):
                place = chance.randrange(len(text) + 1)
                text = text[:place] + chance.choice((*ODD, *reader.pieces)) + text[place + chance.randint(0, 8) :]
            yield text
        else:
            pieces = (*reader.pieces, *reader.pieces, *ODD)
            yield chance.choice(reader.joined).join(chance.choice(pieces) for _ in range(chance.randint(1, 12)))


@pytest.mark.parametrize("name", READERS)
def test_a_reader(name: str, tmp_path: Path) -> None:
    reader, chance = READERS[name], random.Random(f"{SEED} {name}")
    for text in make_texts(reader, chance):
        try:
            reader.read(text, tmp_path)
        except reader.refuses:
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} of {text[:2_000]!a}") from error


def make_archive(chance: random.Random) -> bytes:
    """Returns a tar.gz or a zip with odd members, of which some bytes may be broken."""
    names = [
        *("index.html", "a/b", "../x", "/x", "a" * 300, "\ud800", "é"),
        *("a\\b", "a\nb", ".", "", "a//b", "a/./b", "b" * 90),
    ]
    target, is_zip = io.BytesIO(), chance.random() < 0.5
    if is_zip:
        with zipfile.ZipFile(target, "w") as packed:
            for name in chance.sample(names, chance.randint(1, 5)):
                with contextlib.suppress(ValueError, UnicodeError):
                    info = zipfile.ZipInfo(name or "x")
                    info.external_attr = chance.choice([0, 0o777 << 16, 0o120777 << 16, 0xFFFFFFFF])
                    packed.writestr(info, b"x" * chance.randint(0, 50))
    else:
        with tarfile.open(
            fileobj=target, mode="w:gz", format=chance.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
        ) as tar:
            for name in chance.sample(names, chance.randint(1, 5)):
                member = tarfile.TarInfo(name)
                member.type = chance.choice(
                    [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
                )
                member.linkname, member.mtime = chance.choice(names), chance.choice([0, -1, 1 << 40])
                member.pax_headers = (
                    {"size": chance.choice(["1", BIG[:100], "-1", "x"])} if chance.random() < 0.2 else {}
                )
                with contextlib.suppress(ValueError, UnicodeError):
                    tar.addfile(member)
    content = bytearray(target.getvalue())
    if not is_zip and chance.random() < 0.5:
        plain = bytearray(gzip.decompress(bytes(content)))
        _break(plain, chance)
        return gzip.compress(bytes(plain))
    if chance.random() < 0.7:
        _break(content, chance)
    return bytes(content)


def _break(content: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(0, 5)):
        if content:
            place = chance.randrange(len(content))
            content[place : place + chance.randint(1, 4)] = chance.choice(
                [b"", b"\xff", b"\0\0", b"9999", struct.pack("<I", 1 << 31)]
            )


def test_archives(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    for number in range(ROUNDS):
        content = make_archive(chance)
        (folder := tmp_path / f"{number}" / "inside").mkdir(parents=True)
        for read in (
            lambda archive: check_tar(archive, 100, 1 << 20),
            lambda archive: pack_zip(archive, io.BytesIO(), 100, 1 << 20),
            lambda archive, folder=folder: unpack(archive, str(folder), 100, 1 << 20),
        ):
            try:
                read(io.BytesIO(content))
            except Refused:
                pass
            except Exception as error:
                raise AssertionError(f"{type(error).__name__} of {content[:2_000]!r}") from error
        assert [path.name for path in folder.parent.iterdir()] == ["inside"]
