"""Every reader of what customers, operators and other machines write refuses it in its own words, or takes it.

Each round puts pieces of the format together at random, or breaks a good example. The seeds are fixed. `HOSTILE_ROUNDS`
sets the number of rounds of each reader, and `HOSTILE_SEED` another seed.
"""

import asyncio
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

import click
import msgspec
import pytest

from capsule_gateway.cli.arguments import TIME, find_app_name
from capsule_gateway.cli.limits import _read_limit
from capsule_gateway.cli.service import WrongUsage
from gateway.accounts.app_fields import NewAuth, NewRepository, check_auth, check_repository
from gateway.accounts.domain_names import check_own_domain
from gateway.accounts.jose.jwk import public_part, read_key, split_document
from gateway.accounts.vault import Vault
from gateway.deploys.archives import Refused, check_tar, pack_zip, unpack
from gateway.deploys.manifest import ManifestError, seal_manifest
from gateway.deploys.recognition import SourceFolder, Unrecognizable, recognize
from gateway.deploys.sources import read_format
from gateway.errors import MediaTypeUnsupported, RequestMalformed
from gateway.inference.provider.connection import read_retry_after
from gateway.inference.spend.limits import check_euro
from gateway.monitors.scans import read_scan
from gateway.outbound.addresses import BlockedAddress, CallFailed, check_url
from gateway.outbound.dns import Resolver
from gateway.settings import BadSettings, Settings, load
from gateway.settings.prices import PRICES, read_prices
from gateway.settings.providers import read_providers
from gateway.validation import parse_time
from workers.backup.names import find_record_fault, is_file
from workers.backup.scripts import KeyCopy
from workers.backup.target import BackupTarget, BadBackup, open_target
from workers.hosting.rules import compile_rules
from workers.sandbox.tools import NODE, PYTHON, Program
from workers.sandbox.versions import choose_versions

ROUNDS, SEED = int(os.environ.get("HOSTILE_ROUNDS", "300")), int(os.environ.get("HOSTILE_SEED", "1"))
VAULT = Vault("an-encryption-key-of-32-characters")
SECRET = "hunter2-hunter2"
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


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(encode(text))


def read_rules(text: str, folder: Path) -> None:
    release = Path(tempfile.mkdtemp(dir=folder))
    write(release / "files", {"_redirects": text, "_headers": text})
    compile_rules(release)


def read_recognition(text: str, folder: Path) -> None:
    source = Path(tempfile.mkdtemp(dir=folder))
    name, _, content = text.partition("\n")
    files = ("package.json", "pyproject.toml", "angular.json", "requirements.txt", "manage.py", "pnpm-lock.yaml")
    known = next((each for each in files if each == name), "package.json")
    more = {"package.json": '{"dependencies":{"@angular/core":"1"}}'} if known == "angular.json" else {}
    write(source, {**more, known: content, ".nvmrc": content, ".python-version": text})
    with contextlib.suppress(Unrecognizable):
        recognize(SourceFolder(source)).describe()
    tools = [Program(NODE, "20.1.0", ""), Program(PYTHON, "3.11.0", "")]
    choose_versions(SourceFolder(source), tools)


def read_provider_file(text: str, folder: Path) -> None:
    write(folder, {"providers.toml": text})
    try:
        read_providers(str(folder / "providers.toml"), ("fr-par",), PRICES, {})
    except ValueError as error:
        if SECRET in str(error):
            raise AssertionError("the file's password is repeated") from error
        raise


def read_price_file(text: str, folder: Path) -> None:
    write(folder, {"prices.toml": text})
    for tariff in read_prices(str(folder / "prices.toml")):
        assert all(price.input > 0 and price.output > 0 for price in tariff.prices.values())


def read_setting(text: str, folder: Path) -> None:
    name, _, value = text.partition("\n")
    try:
        load({f"GATEWAY_{name}": value, "GATEWAY_MAIL_FROM": "a@b.example"})
    except BadSettings as error:
        if name.endswith(("URL", "ISSUER", "ACME", "REGISTRIES")) and SECRET in str(error):
            raise AssertionError(f"{name} repeats a password") from error
        raise


def read_app_name(text: str, folder: Path) -> None:
    write(folder, {"capsule.toml": text})
    (folder / ".git").mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        find_app_name()


def read_repository(text: str, folder: Path) -> None:
    check_repository(NewRepository(text[:2_048], text[-20:]), VAULT, allow_private=False)


def read_auth(text: str, folder: Path) -> None:
    check_auth(msgspec.convert({"kind": "backend", "url": text[:2_048]}, NewAuth), VAULT, allow_private=False)


def read_key_set(text: str, folder: Path) -> None:
    for key in split_document(encode(text)):
        read_key(key)
        public_part(key)


def read_backup_time(text: str, folder: Path) -> None:
    target = BackupTarget(open_target(str(folder)), VAULT)
    asyncio.run(target.find(text))


def read_limit(text: str, folder: Path) -> None:
    _read_limit("requestsPerMinute", text)
    check_euro(text, "dailyEuro", "100", "the service")


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
PROVIDERS = (
    f'[[provider]]\nname = "a"\nurl = "https://user:{SECRET}@host.example/v1"\nregion = "fr-par"\nkey_env = "KEY"\n'
    'concurrency = 5\nrate = { requests = 5, tokens = 7 }\nmodels = { "gpt-oss-120b" = "x" }\n'
)
PRICE_TABLES = (
    '[[price]]\nmodel = "gpt-oss-120b"\ninput = 0.2\noutput = 1\nsince = 2027-01-01\n'
    '[[price]]\nmodel = "new"\ninput = 1e3\noutput = 0.001\nsince = 2027-01-01T12:00:00+02:00\n'
)
JSON = ("{", "}", "[", "]", ":", ",", '"', "\\u0000", '"\\ud800"', "1", "null")
PACKAGE = (
    'package.json\n{"name":"@a/b","packageManager":"pnpm@9.1.0","scripts":{"build":"x","start":"y"},'
    '"dependencies":{"next":"1"},"devDependencies":{"vite":"^5"},"engines":{"node":">=18 <22"}}'
)
PYPROJECT = (
    'pyproject.toml\n[project]\nname = "x"\ndependencies = ["fastapi>=1", "uvicorn"]\n'
    "[tool.poetry.dependencies]\na = 1\n"
)
ANGULAR = (
    'angular.json\n{"defaultProject":"a","projects":{"a":{"architect":{"build":{"builder":"x:application",'
    '"options":{"outputPath":{"base":"d","browser":"b"}}}}}}}'
)
URL = (
    *("https://", "http://", "//", "user", f":{SECRET}", "@", "host.example"),
    *("[::1]", "127.0.0.1", ":443", ":0", "/a", "?b"),
)
JWKS = (
    '{"keys":[{"kty":"RSA","n":"AQAB","e":"AQAB","kid":"1"},'
    '{"kty":"EC","crv":"P-256","x":"AA","y":"AA","alg":"ES256"}]}'
)
SCAN = '{"findings":[{"cve":"CVE-1","component":"a","severity":"high","fixedIn":"1"}]}'
OSV = (
    '{"results":[{"packages":[{"package":{"name":"a","version":"1"},'
    '"vulnerabilities":[{"id":"x"}],"groups":[{"ids":["x"]}]}]}]}'
)
SETTINGS = [
    each.name.upper() for each in msgspec.structs.fields(Settings) if each.name not in ("redis_url", "providers_file")
]
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
    "the command line's manifest": Reader(
        read_app_name, (WrongUsage,), (*TOML, *MANIFEST_KEYS), ("", "\n"), [MANIFEST]
    ),
    "recognition": Reader(read_recognition, (), (*JSON, *TOML), ("", " "), [PACKAGE, PYPROJECT, ANGULAR]),
    "providers": Reader(
        read_provider_file, (ValueError,), (*TOML, "[[provider]]", "name"), ("", "\n", " = "), [PROVIDERS]
    ),
    "prices": Reader(
        read_price_file,
        (ValueError,),
        (*TOML, "[[price]]", "since", "0001-01-01T00:00:00+23:00", "9999-12-31", "nan", "inf", "1e-9"),
        ("", "\n", " = "),
        [PRICE_TABLES],
    ),
    "settings": Reader(
        read_setting,
        (BadSettings,),
        (
            *("free=", "app=", "user=", "connect=", "http://", "s3://", "smtp://", "file://"),
            *(f"a:{SECRET}@", "host", ":25", "/", "0"),
        ),
        ("", ",", "=", " ", ":"),
        [
            f"{name}\n{text}"
            for name in SETTINGS
            for text in ("1", "free=1", f"https://u:{SECRET}@h℀st", f"smtp://u:{SECRET}@[x")
        ],
    ),
    "domains": Reader(
        lambda text, _: check_own_domain(text, Settings()),
        (RequestMalformed,),
        ("xn--", "xn--a", "xn--zca", "a", ".", "example", ".org", "-", "é", "ß", "\u200d", "א", "xn--99999999999"),
        ("", "."),
        ["xn--bcher-kva.example", "例え。テスト"],
    ),
    "addresses": Reader(
        lambda text, _: check_url(text, allow_private=False), (BlockedAddress,), URL, ("",), ["https://a.example/x"]
    ),
    "repositories": Reader(read_repository, (RequestMalformed,), URL, ("",), ["https://u:p@a.example/x.git"]),
    "auth": Reader(read_auth, (RequestMalformed,), URL, ("",), ["https://a.example/x", "/keys"]),
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
    "retry-after": Reader(
        lambda text, _: read_retry_after(text.encode("latin-1", "replace")),
        (),
        ("Wed, 21 Oct 2015 07:28:00 GMT", "Wed", "21", "Oct", "99999", "07:28:00", "GMT", "+9999", "1.5", "0"),
        ("", " ", ", "),
        ["Wed, 21 Oct 2015 07:28:00 GMT", "120"],
    ),
    "content types": Reader(
        lambda text, _: read_format(text),
        (MediaTypeUnsupported,),
        ("application/zip", "text/html", ";", "charset=x"),
        ("", " "),
    ),
    "times of the API": Reader(
        lambda text, _: parse_time("since", text),
        (RequestMalformed,),
        ("2026", "-07", "-02", "T10:00", ":00", "Z", "+00:00", "0001-01-01", "9999-12-31", "W01", "1d", "-99:99"),
        ("",),
        ["2026-07-02T10:00:00.000Z", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"],
    ),
    "times of the command line": Reader(
        lambda text, _: TIME.convert(text, None, None),
        (click.BadParameter,),
        ("999999d", "1h", "30m", "2026", "-07-02", "T10:00", "Z", "٣d", "0001-01-01", "9999-12-31"),
        ("",),
        ["30m", "2026-07-02T10:00:00Z"],
    ),
    "times of backups": Reader(read_backup_time, (BadBackup,), ("2026", "-07", "T10", "Z"), ("",), ["2026-07-02"]),
    "limits": Reader(read_limit, (WrongUsage, RequestMalformed), ("1", "0.5", "e9", "-", "٣"), ("",), ["0.02", "60"]),
    "names of files in a backup": Reader(
        lambda text, _: is_file(text),
        (),
        ("sources/", "data/", "snapshots/", "a", "..", "certificates/caddy/"),
        ("", "/"),
    ),
    "records in a backup": Reader(
        lambda text, _: find_record_fault(KeyCopy("app:x", "string", -1, [text])),
        (),
        (*JSON, '"id"', '"name"'),
        ("", ":"),
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
    taken = 0
    for text in make_texts(reader, chance):
        try:
            reader.read(text, tmp_path)
        except reader.refuses:
            continue
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} of {text[:2_000]!a}") from error
        taken += 1
    print(f"{name}: {ROUNDS} texts, of which {taken} were taken")


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


class Garbler(asyncio.DatagramProtocol):
    """A DNS server that breaks its own answers."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        question = data[12:]
        text = self.chance.choice([b"", b"a", b"\xff" * 255, b"\0"])
        record = b"\xc0\x0c\x00\x10\x00\x01\x00\x00\x00\x3c" + struct.pack(">HB", len(text) + 1, len(text)) + text
        count = self.chance.choice([0, 1, 2, 65_535])
        content = bytearray(data[:2] + b"\x81\x80\x00\x01" + struct.pack(">H", count) + b"\0\0\0\0" + question + record)
        if self.chance.random() < 0.8:
            body = content[12:]
            _break(body, self.chance)
            content[12:] = body
        self.transport.sendto(bytes(content), address)


async def test_answers_of_the_dns() -> None:
    loop, chance = asyncio.get_running_loop(), random.Random(SEED)
    transport, _ = await loop.create_datagram_endpoint(lambda: Garbler(chance), ("127.0.0.1", 0))
    host, port = transport.get_extra_info("sockname")
    resolver = Resolver(f"{host}:{port}", lookup_seconds=0.02, attempt_seconds=0.01)
    try:
        for _ in range(ROUNDS // 3):  # an answer that cannot be read is waited out
            with contextlib.suppress(CallFailed):
                found = await resolver.find_txt("_capsule.shop.example.com")
                assert all(isinstance(text, str) for text in found)
    finally:
        transport.close()
