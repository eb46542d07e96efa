"""The manifest: what it may contain, the position of each fault, and its effect on the app's record."""

import contextlib
import time

import pytest

from gateway.accounts.records import App, BackendAuth, Build, JwksAuth, SecretAuth, set_fields
from gateway.accounts.vault import Vault
from gateway.deploys.manifest import (
    MAX_BYTES,
    Manifest,
    ManifestBuild,
    ManifestDev,
    ManifestError,
    apply_manifest,
    parse_manifest,
    seal_manifest,
    undo_manifest,
)

WHOLE = b"""\
#:schema https://api.example.com/docs/capsule.schema.json
name = "notes"
[build]
command = "npm ci && npm run build"
start = "node server.ts"
overlap = false
health = "/healthz"
[auth]
kind = "jwks"
url = "/api/auth/jwks"
[dev]
command = "npm run dev"
"""
SECRET = "s" * 32


def seal(text: bytes, vault: Vault | None = None, *, allow_private: bool = False) -> Manifest:
    return seal_manifest(text, vault or Vault("key"), allow_private=allow_private)


def test_a_whole_manifest() -> None:
    build = ManifestBuild("npm ci && npm run build", "dist", "node server.ts", "/healthz", False)
    expected = Manifest("notes", build, JwksAuth("/api/auth/jwks"), ManifestDev("npm run dev"))
    assert seal(WHOLE) == expected
    assert seal(b"\xef\xbb\xbf" + WHOLE.replace(b"\n", b"\r\n")) == expected
    assert not expected.overlap
    assert expected.record_build == Build("npm ci && npm run build", "dist", "node server.ts", "/healthz")
    assert seal(b"") == Manifest()
    assert Manifest().overlap


def test_a_secret_is_stored_encrypted_and_must_be_long() -> None:
    text = f'auth = {{kind = "secret", secret = "{SECRET}"}}'.encode()
    auth = seal(text).auth
    assert isinstance(auth, SecretAuth)
    assert auth.secret != SECRET
    assert Vault("key").open(auth.secret) == SECRET
    with pytest.raises(ManifestError, match=r"^capsule.toml, line 1: auth.secret: .*GATEWAY_ENCRYPTION_KEY"):
        seal(text, Vault(""))
    with pytest.raises(ManifestError, match=r"auth\.secret: at least 32 bytes"):
        seal(text.replace(b"s" * 32, b"short"))


TEXT = "must be text, not a whole number"
LABEL = "an app's name is a DNS label: 1 to 63 of a-z, 0-9 and single hyphens, none at the ends"
FOLDER = "name a folder inside the source, such as dist, without '..'"
SLASH = "begin a path at the app's own address with one slash"
CHARACTER = "The address contains a space, a backslash or a control character; remove it"
PATH = "write a path at the app's own address, such as /healthz"
PATHS = ["", "up", "//up", "/a b", "/a#b", "/é", "/a\\nb"]  # that are refused

# A manifest; its fault, with line and column.
FAULTS = [
    # Syntax.
    ("name = ", 1, 8, "invalid value"),
    ('name = "a"\ntitle = "b"', 2, 1, "there is no table or key called title"),
    ("x = '" + "9" * 5_000 + "'\ny = [\n1,\n-1_" + "0" * 5_000 + "]", 4, 1, "a number has too many digits"),
    ("x = " + "[" * 5_000, 1, 1, "values are nested too deeply"),
    # Structure.
    ('[build]\n# the command\n  comand = "x"', 3, 3, "build: there is no key called comand"),
    ('name = "a"\nbuild = "make"', 2, 1, "build: must be a table, not text"),
    ('[build]\ncommand = """\na\nb"""\nstart = true', 5, 1, "build.start: must be text, not true or false"),
    ('build = {command = "{a = 1}, b", output = "x", start = 2}', 1, 48, f"build.start: {TEXT}"),
    ('[auth]\nkind = "magic"', 2, 1, "auth.kind: must be one of jwks, secret, backend"),
    ('[auth]\nkind = "jwks"\naudience = [\n"a",\n1,\n]\nissuer = "b"', 3, 1, f"auth.audience: {TEXT}"),
    # Values.
    ('name = "Not A Label"', 1, 1, f"name: {LABEL}"),
    ('[build]\noutput = "../x"', 2, 1, f"build.output: {FOLDER}"),
    ('[build]\ncommand = "a\\u0000"', 2, 1, "build.command: a command cannot contain a NUL character"),
    ('[build]\nstart = " "', 2, 1, "build.start: write a command, or leave it out to serve files"),
    *[(f'[build]\nstart = "a"\nhealth = "{path}"', 3, 1, f"build.health: {PATH}") for path in PATHS],
    ('[auth]\nkind = "jwks"\nurl = "http://a.com"', 3, 1, "auth.url: The address must start with https://"),
    ('[build]\nhealth = "/up"', 2, 1, "build.health: files have no health check; add a start command, or leave it out"),
    ('[auth]\nkind = "jwks"\nurl = "//127.0.0.1/keys"', 3, 1, f"auth.url: {SLASH}"),
    ('[auth]\nkind = "backend"\nurl = "/a\\\\b"', 3, 1, f"auth.url: {CHARACTER}"),
]


@pytest.mark.parametrize(("text", "line", "column", "fault"), FAULTS)
def test_a_fault_is_reported_with_its_position(text: str, line: int, column: int, fault: str) -> None:
    with pytest.raises(ManifestError) as raised:
        seal(text.encode())
    assert str(raised.value) == f"capsule.toml, line {line}: {fault} (column {column})"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_manifest_as_powershell_writes_it(encoding: str) -> None:
    text = 'name = "notes"\r\n[build]\r\noutput = "größe"\r\n'
    assert parse_manifest(text.encode(encoding)) == parse_manifest(text.encode())
    with pytest.raises(ManifestError, match=r"^capsule.toml, line 2: "):
        parse_manifest('name = "notes"\r\nmore = 1'.encode(encoding))


def test_a_manifest_that_is_no_text_or_too_large() -> None:
    with pytest.raises(ManifestError, match=r"^capsule.toml, line 2: the file is not text in UTF-8"):
        parse_manifest(b'name = "a"\n\xff')
    with pytest.raises(ManifestError, match="more than 16 KiB"):
        parse_manifest(b"#" * (MAX_BYTES + 1))


HOSTILE = {
    "dots": "a." * (MAX_BYTES // 2 - 3) + "a = 1",
    "words and dots": ("a" * 500 + ".") * 31 + "a = 1",
    "quoted words": "'' " * (MAX_BYTES // 3),
    "brackets": "[" * MAX_BYTES,
    "tables": "a = " + "{a=" * 5_000,
    "lines": "\n" * MAX_BYTES,
    "keys": "\n".join(f"k{number} = 1" for number in range(1_400)),
}


def test_a_hostile_manifest_takes_no_time() -> None:
    for name, text in HOSTILE.items():
        began = time.thread_time()
        with contextlib.suppress(ManifestError):
            parse_manifest(text.encode())
        assert time.thread_time() - began < 0.3, name


APP = App(id="app-1", name="notes", account="acc_1", createdAt="2026-01-01T00:00:00.000Z")


def test_what_the_manifest_names_replaces_the_record_until_the_deploy_fails() -> None:
    app = set_fields(APP, {"auth": BackendAuth("https://example.com/me"), "build": Build("make")})
    both = seal(WHOLE)
    changed = apply_manifest(app, "dep_1", both)
    assert changed.auth == JwksAuth("/api/auth/jwks")
    assert changed.build == Build("npm ci && npm run build", "dist", "node server.ts", "/healthz")
    assert apply_manifest(changed, "dep_1", both) == changed, "a repetition keeps what was replaced first"
    assert undo_manifest(changed, "dep_1") == app
    assert undo_manifest(changed, "dep_2") == changed, "only the deploy itself is undone"

    only = apply_manifest(app, "dep_1", seal(b'[build]\nstart = "x"'))
    assert (only.auth, only.build) == (app.auth, Build(start="x"))
    assert apply_manifest(app, "dep_1", seal(b'name = "notes"')) == app


def test_a_deploy_that_fails_leaves_what_was_set_meanwhile() -> None:
    changed = set_fields(apply_manifest(APP, "dep_1", seal(WHOLE)), {"auth": JwksAuth("https://example.com/keys")})
    undone = undo_manifest(changed, "dep_1")
    assert undone.auth == JwksAuth("https://example.com/keys")
    assert undone.build is None


@pytest.mark.parametrize(
    ("auth", "same"),
    [(JwksAuth("/keys"), False), (BackendAuth("/me"), False), (JwksAuth("https://a.example/k"), True)],
)
def test_a_path_is_verified_anew_after_a_rename_only_where_the_name_matters(
    auth: JwksAuth | BackendAuth, same: bool
) -> None:
    app = set_fields(APP, {"auth": auth})
    assert (app.auth_digest == set_fields(app, {"name": "renamed"}).auth_digest) is same
