"""Settings that are read, and those that are invalid or missing: a message names the variable, and no secret."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import BadSettings, ProviderRate, RateLimits, Settings, find_doubts, find_unread, load
from gateway.settings.parsing import GONE
from gateway.settings.prices import PRICES
from tests.gateway.conftest import Launch
from tests.support.folders import as_ordinary_user, passable_folder
from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


ROOT = Path(__file__).parents[3]

BAD = """
REDIS_URL=ftp://localhost REDIS_WAIT=-1 INFERENCE=maybe PROCESSING_APPROVED=perhaps REGISTRATIONS_PER_DAY=many
ACCOUNT_GRACE=-1 DEPLOY_QUOTAS=free=x APP_LIMITS=free=-1 RATE_LIMITS=app=0.5,user=-1 DAILY_CAPS=free=-1
PROVIDER_TIMEOUTS=connect=never KEEP_ALIVE=soon DRAIN=-5 LOG_LEVEL=loud LOG_FORMAT=xml ENCRYPTION_KEY=short
APPS_URL=https://example.com PROBE_CHECK_URL=example.com CERTIFICATE_ADDRESS=edge.example.com FINDING_DEADLINES=orange=7
KUBERNETES_NAMESPACE=Bad_NS KUBERNETES_INGRESS_NAMESPACE=a.b KUBERNETES_INGRESS_CLASS=-nginx
KUBERNETES_STORAGE_CLASS=fast..ssd KUBERNETES_RUNTIME_CLASS=gVisor KUBERNETES_TLS_ISSUER=letsencrypt\\prod
BUILD_REGISTRIES=cargo=https://mirror.example.com
"""


async def test_one_message_names_every_invalid_variable() -> None:
    values = dict(f"GATEWAY_{each}".split("=", 1) for each in BAD.split())
    with pytest.raises(BadSettings) as raised:
        load(values)
    assert sorted(line.partition(":")[0] for line in str(raised.value).splitlines()) == sorted(values)


async def test_secrets_are_refused_without_an_encryption_key(launch: Launch) -> None:
    async with launch(GATEWAY_ENCRYPTION_KEY="") as gw:
        account = await gw.account()
        body = {"account": account.id, "auth": {"kind": "secret", "secret": "secret of more than thirty-two bytes"}}
        gw.confidential.add("secret of more than thirty-two bytes")
        for response in (
            await gw.platform("PUT", "apps/secretive", body),
            await account.call("PUT", "/account/webhook", {"url": "https://127.0.0.1/"}),
        ):
            error = refused(response, 400, "REQUEST_MALFORMED")
            assert "set GATEWAY_ENCRYPTION_KEY; the service stores no secrets without it" in error["message"]
        assert (await gw.platform("GET", "apps/secretive")).status_code == 404


async def test_a_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.env` is read from the working folder, and the environment takes precedence."""
    (tmp_path / ".env").write_text('# for tests\nGATEWAY_RATE_LIMITS=app=7,user=5\nGATEWAY_DRAIN="1"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_DRAIN", "2")
    settings = load()
    assert (settings.rate_limits, settings.drain) == (RateLimits(app=7, user=5), 2.0)


async def test_invalid_operator_tokens_are_not_repeated() -> None:
    invalid = ["token-of-ana-" + "x" * 20, "short-token", "token-of-bob-" + "x" * 20]
    for text in ("{0}", "ana={1}", "ana={0},ana={2}", "ana={0},bob={0}", "operator={0}", "an a={0}"):
        with pytest.raises(BadSettings, match=r"^GATEWAY_OPERATOR_TOKENS: ") as caught:
            load({"GATEWAY_OPERATOR_TOKENS": text.format(*invalid)})
        assert not [token for token in invalid if token in str(caught.value)]
    with pytest.raises(BadSettings, match=r"^GATEWAY_OPERATOR_TOKEN: must have at least 20") as caught:
        load({"GATEWAY_OPERATOR_TOKEN": "admin"})
    assert "admin" not in str(caught.value)
    tokens = {"ana": "abcdefghijklmnopqrst==", "bob@example.com": "0123456789abcdefghij"}
    text = ", ".join(f"{name}={token}" for name, token in tokens.items())
    settings = load({"GATEWAY_OPERATOR_TOKENS": text, "GATEWAY_OPERATOR_TOKEN": "x" * 20})
    assert (settings.operator_tokens, settings.operator_token) == (tokens, "x" * 20)


OIDC = {
    "GATEWAY_OIDC_ISSUER": "https://id.example.com/application/o/capsule/",
    "GATEWAY_OIDC_CLIENT_ID": "capsule",
    "GATEWAY_OIDC_CLIENT_SECRET": "the-client-s-secret",
}


async def test_an_invalid_sign_in() -> None:
    changes = [({name: ""}, name) for name in OIDC]
    changes.append(({"GATEWAY_OIDC_ISSUER": "http://id.example.com"}, "GATEWAY_OIDC_ISSUER"))
    changes += [({"GATEWAY_OIDC_OPERATORS": text}, "GATEWAY_OIDC_OPERATORS") for text in ("ana", "groups=", "a@b.c,")]
    for change, wrong in changes:
        with pytest.raises(BadSettings, match=f"^{wrong}: [^\n]*$") as caught:
            load({**OIDC, **change})
        assert OIDC["GATEWAY_OIDC_CLIENT_SECRET"] not in str(caught.value)
    settings = load({**OIDC, "GATEWAY_OIDC_OPERATORS": "Ana@Example.com, groups=Ops,hd=example.com"})
    assert settings.oidc_issuer == OIDC["GATEWAY_OIDC_ISSUER"], "the slash at the end is part of the name"
    assert settings.oidc_operators == ("ana@example.com", "groups=Ops", "hd=example.com")
    # Trusting addresses needs a provider.
    assert not load({"GATEWAY_OIDC_TRUST_EMAIL": "false"}).oidc_trust_email
    with pytest.raises(BadSettings, match="GATEWAY_OIDC_ISSUER: is missing"):
        load({"GATEWAY_OIDC_TRUST_EMAIL": "true"})


# -- the providers file ----------------------------------------------------------------------------------------

ONE = 'name = "one"\nurl = "https://a.example/v1"\nregion = "fr-par"\nkey_env = "ONE_KEY"\n'


def read_file(tmp_path: Path, *tables: str, text: str = "", **environ: str) -> Settings:
    path = tmp_path / "providers.toml"
    path.write_text(text or "".join(f"[[provider]]\n{table}" for table in tables))
    return load({"GATEWAY_PROVIDERS_FILE": str(path), **environ})


async def test_a_providers_file(tmp_path: Path) -> None:
    two = (
        ONE.replace("one", "two")
        .replace("fr-par", "nl-ams")
        .replace('key_env = "ONE_KEY"', f'key_file = "{tmp_path}/key"')
        + 'concurrency = 0\nrate = { tokens = 9 }\nmodels = { "gpt-oss-120b" = "openai/gpt" }\n'
    )
    (tmp_path / "key").write_text("from-a-file\n")
    settings = read_file(tmp_path, ONE, two, GATEWAY_REGIONS="fr-par, nl-ams", ONE_KEY="from-a-variable")
    one, other = settings.providers
    assert (one.name, one.concurrency, one.rate, one.read_key()) == ("one", 100, None, "from-a-variable")
    assert list(one.models.items()) == [(model, model) for model in PRICES]
    assert (other.concurrency, other.rate, other.read_key()) == (0, ProviderRate(0, 9), "from-a-file")
    assert dict(other.models) == {"gpt-oss-120b": "openai/gpt"}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([], "1 to 8 tables"),
        ([ONE, ONE], r"provider\[1\].name: 'one' is the name of another"),
        ([ONE.replace('"one"', '"One"')], r"provider\[0\].name"),
        ([ONE.replace('name = "one"\n', "")], "missing required field `name`"),
        ([ONE.replace("https://a.example/v1", "a.example")], r"provider\[0\].url"),
        ([ONE.replace("fr-par", "us-east")], r"provider\[0\].region: 'us-east' is not one of GATEWAY_REGIONS"),
        ([ONE + 'key_file = "/x"\n'], r"provider\[0\].key_file"),
        ([ONE + 'key = "secret-key"\n'], "unknown field `key`"),
        ([ONE + "concurrency = -1\n"], r"provider\[0\].concurrency"),
        ([ONE + 'models = { "gpt-5" = "x" }\n'], r"provider\[0\].models: 'gpt-5' has no price"),
        (['name = "one\n'], "line 2"),
        ([ONE + "rate = { tokens = 9_223_372_036_854_775_807 }\n"], r"provider\[0\].rate.tokens"),
        ([ONE.replace("//", "//user:secret-key@")], r"provider\[0\].url: must not contain a user or a password"),
    ],
)
async def test_a_fault_in_the_providers_file_stops_the_start(tmp_path: Path, tables: list[str], said: str) -> None:
    with pytest.raises(BadSettings, match=f"^GATEWAY_PROVIDERS_FILE: .*providers.toml: .*{said}") as caught:
        read_file(tmp_path, *tables, text="" if tables else "# none\n")
    assert "secret-key" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        *(
            (ONE.replace("https://a.example", url), "")
            for url in ("http://localhost:8000", "http://10.1.2.3", "http://a.svc")
        ),
        *(
            (ONE.replace("https://a.example", url), "provider one: prompts go there without TLS")
            for url in ("HTTP://a.example", "http://8.8.8.8", "http://[2606:4700::1]")
        ),
        (ONE + 'models = { "llama-3.3-70b-instruct" = "x" }\n', "no provider serves gpt-oss-120b"),
    ],
)
async def test_doubtful_providers(tmp_path: Path, table: str, said: str) -> None:
    doubts = find_doubts(read_file(tmp_path, table))
    assert [each.fault.partition(",")[0] for each in doubts] == ([said] if said else [])


async def test_a_providers_file_replaces_the_variables(tmp_path: Path) -> None:
    values = {"URL": "https://x.example", "KEY": "k", "KEY_FILE": "/k", "CONCURRENCY": "1", "RATE": "tokens=1"}
    with pytest.raises(BadSettings) as raised:
        read_file(tmp_path, ONE, **{f"GATEWAY_PROVIDER_{name}": value for name, value in values.items()})
    lines = str(raised.value).splitlines()
    assert {line.partition(":")[0] for line in lines} == {f"GATEWAY_PROVIDER_{name}" for name in values}
    (only,) = load({"GATEWAY_PROVIDER_KEY": "k", "GATEWAY_PROVIDER_CONCURRENCY": "7"}).providers
    assert (only.name, only.region, only.read_key(), only.concurrency) == ("default", "fr-par", "k", 7)


async def test_a_providers_file_that_cannot_be_read(tmp_path: Path) -> None:
    for content in (b"\xff", b"x = [" + b"[" * 10_000, b"#" * 70_000):
        (tmp_path / "providers.toml").write_bytes(content)
        with pytest.raises(BadSettings, match=r"^GATEWAY_PROVIDERS_FILE: "):
            load({"GATEWAY_PROVIDERS_FILE": str(tmp_path / "providers.toml")})
    with pytest.raises(BadSettings, match=r"cannot be read: No such file"):
        load({"GATEWAY_PROVIDERS_FILE": str(tmp_path / "missing")})


UNREAD = {
    "GATEWAY_HOST_ADDRESS": "is gone: one host serves all apps, and beyond one machine Kubernetes does "
    "(docs/kubernetes.md); unset it",
    "GATEWAY_DAILY_CAP": "is unknown, and nothing reads it; did you mean GATEWAY_DAILY_CAPS?",
    "GATEWAY_REGISTRATION_PER_DAY": "is unknown, and nothing reads it; did you mean GATEWAY_REGISTRATIONS_PER_DAY?",
    "GATEWAY_COFFEE": "is unknown, and nothing reads it; unset it",
    "CAPSULE_LISTENS": "is unknown, and nothing reads it; did you mean CAPSULE_LISTEN?",
}


async def test_variables_that_nothing_reads_are_named_at_the_start(gw: Gateway, tmp_path: Path) -> None:
    """And what else is doubtful. A port that is taken ends it."""
    in_file, in_environment = list(UNREAD)[:3], list(UNREAD)[3:]
    (tmp_path / ".env").write_text("".join(f"{name}=secret-value\n" for name in in_file))
    run = subprocess.run(
        [sys.executable, "-m", "capsule_gateway", "serve", "--port", str(gw.port)],
        env={
            **gw.environment,
            **dict.fromkeys(in_environment, "secret-value"),
            "GATEWAY_PROVIDER_URL": "http://a.example",
            "PYTHONPATH": str(ROOT),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert "secret-value" not in run.stderr
    assert sorted(line.removeprefix("capsule: ") for line in run.stderr.splitlines()) == sorted(
        [
            *(f"{name} {text}" for name, text in UNREAD.items()),
            "provider default: prompts go there without TLS; use https://, unless it is in your own network",
            f"port {gw.port} of 127.0.0.1 is in use: stop the process that listens there, or choose another --port",
        ]
    )


async def test_all_variables_of_the_project_are_known() -> None:
    texts = [ROOT / name for name in ("compose.yaml", "Dockerfile", "Makefile", "README.md", ".env.example")]
    for folder in ("docs", "ops", "gateway", "workers", "capsule_gateway", "capsule", "bench"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".yaml", ".yml", ".sh")]
    found = {name for path in texts for name in re.findall(r"\b(?:GATEWAY|CAPSULE)_[A-Z_]*[A-Z]\b", path.read_text())}
    assert {"GATEWAY_REDIS_URL", "CAPSULE_LISTEN", "CAPSULE_POD"} <= found
    unread = {each.fault.partition(" ")[0] for each in find_unread(dict.fromkeys(found, "x"))}
    assert unread == GONE.keys()


async def test_variables_that_are_known_or_of_others(tmp_path: Path) -> None:
    (tmp_path / "providers.toml").write_text("[[provider]]\n" + ONE.replace("ONE_KEY", "GATEWAY_KEY_OF_PARIS"))
    known = {
        "GATEWAY_PROVIDERS_FILE": str(tmp_path / "providers.toml"),
        "GATEWAY_KEY_OF_PARIS": "key",
        "GATEWAY_DAILY_CAP": " ",
        "GATEWAY_SERVICE_HOST": "10.0.0.1",  # of Kubernetes, for a service with the name gateway
        "GATEWAY_SERVICE_PORT_HTTP": "80",
        "GATEWAY_PORT": "tcp://10.0.0.1:80",
        "GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
        "CAPSULE_WEB_PORT_80_TCP": "tcp://10.0.0.1:80",
        "CAPSULE_COLOR": "of another program",
        "PATH": "/bin",
    }
    assert find_unread(known) == []
    known["GATEWAY_PROVIDERS_FILE"] = str(tmp_path / "missing")
    assert [each.fault for each in find_unread(known)] == ["GATEWAY_KEY_OF_PARIS is unknown, and nothing reads it"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://localhost", "must begin with redis://"),
        ("redis://localhost:99999", "port between 1 and 65535"),
        ("redis://:secret@localhost:1x", "port between 1 and 65535"),
        ("redis://", "must name a host"),
        ("redis://a:1,b:2", "several hosts"),
        ("redis://localhost/main", "the number of a database"),
        ("redis://localhost?socket_timeout=abc", "invalid option"),
        ("rediss://localhost?ssl_ca_certs=/nowhere.pem", "ssl_ca_certs that does not exist"),
        (f"rediss://localhost?ssl_ca_certs={__file__}", "contains no certificates"),
        (f"rediss://localhost?ssl_certfile={__file__}", "must name a certificate"),
        ("redis://localhost?color=red", "does not support: color"),
        ("redis+cluster://a/3", "only one"),
        ("redis+sentinel://a:26379", "the name of the service"),
    ],
)
async def test_an_invalid_address_of_redis_is_explained(url: str, message: str) -> None:
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
        (f"https://{'a' * 64}.example.com/{{host}}", "an address such as"),
        ("https://[::1/{host}", "IPv6"),
    ],
)
async def test_an_invalid_address_is_explained_and_not_repeated(name: str, text: str, message: str) -> None:
    with pytest.raises(BadSettings, match=f"^GATEWAY_{name}: .*{message}") as raised:
        load({f"GATEWAY_{name}": text})
    assert "secret" not in str(raised.value)


async def test_files_that_cannot_be_read(tmp_path: Path) -> None:
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
async def test_a_valid_text(name: str, text: str, kept: Any) -> None:
    assert getattr(load({f"GATEWAY_{name}": text}), name.lower()) == kept


# By variable: how the message begins, and invalid texts.
INVALID: dict[str, tuple[str, list[str]]] = {
    "DAILY_CAPS": ("", ["free=1e999999999", "free=nan"]),
    "ACCOUNT_GRACE": ("", ["9" * 5_000, "36501"]),
    "FINDING_DEADLINES": ("", ["red=9999999"]),
    "STORAGE_URL": ("", ["https://user:secret@[host", "s3://user:secret@[host"]),
    "OIDC_ISSUER": ("", ["https://user:secret@h\u2100st", "https://user:secret@[host"]),
    "EXAMPLE_URL": ("", ["javascript:alert(1)", "https://me:secret@x", "//x", 'https://x"y z', "data:text/html,x"]),
    **dict.fromkeys(("BASE_URL", "API_URL"), (r".*without \? and #", ["https://example.com/v1?version=2"])),
    "PROVIDER_URL": (
        r".*(without \? and #|a user or a password)",
        ["https://example.com/v1?version=2", "https://user:secret@host.example"],
    ),
    "APPS_URL": ("", ["https://user:secret@host.example", "https://user:secret@{host}.example"]),
    "PROVIDER_KEY": ("must be ASCII", ["secret words", "secret ü", "secret\nbreak"]),
    "PROVIDER_RATE": ("", ["600", "requests=0", "requests=-1", "tokens=1e6", "minutes=1", "requests"]),
    "DNS": (
        ".* is not address:port",
        ["192.0.2.1", "resolver:53", "192.0.2.1:0", "192.0.2.1:53,", "2001:db8::1", "[x]:53"],
    ),
    "ACME": ("must be", ["on", "letsencrypt", "http://acme.example.com", "https://", "https://a b"]),
    "UPSTREAM": (
        "",
        ["unix/a.sock", "unix//a b", "unix//", f"unix//{'x' * 107}", "gateway", "unix:/a", "host:" + "9" * 5_000],
    ),
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
async def test_an_invalid_text_is_explained_in_one_line_without_secrets(name: str, text: str) -> None:
    with pytest.raises(BadSettings, match=f"^GATEWAY_{name}: {INVALID[name][0]}[^\n]*$") as raised:
        load({**OIDC, f"GATEWAY_{name}": text})
    assert "secret" not in str(raised.value)
