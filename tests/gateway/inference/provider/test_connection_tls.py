"""The provider over TLS: a private authority, the host name, and a base path."""

import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.server import HANG
from tests.gateway.conftest import Launch
from tests.support.polling import wait_until
from tests.support.responses import answered, refused, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


def certificate(folder: Path, name: str) -> Path:
    """A file with a key and a self-signed certificate for `name`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = folder / f"{name}.pem"
    file.write_bytes(private + built.public_bytes(pem))
    return file


def serving(file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


@pytest_asyncio.fixture(loop_scope="session")
async def secure(tmp_path: Path) -> AsyncIterator[FakeProvider]:
    async with FakeProvider(serving(certificate(tmp_path, "localhost"))) as provider:
        yield provider


async def test_a_trusted_authority(
    launch: Launch, secure: FakeProvider, backend: FakeAppBackend, tmp_path: Path
) -> None:
    url = f"https://localhost:{secure.port}/project-7/v1/"
    async with launch(GATEWAY_PROVIDER_URL=url, GATEWAY_CA_FILE=str(tmp_path / "localhost.pem")) as gw:
        app = await gw.app(backend)
        big = "x" * 300_000
        prompt = secure.plays(tokens("Bon", "jour", big))
        assert answered(await app.ask(prompt))["text"] == "Bonjour" + big
        assert text_of(await app.events(prompt)) == "Bonjour" + big
        assert {e.path for e in secure.asked(prompt)} == {"/project-7/v1/chat/completions"}
        assert len({e.connection for e in secure.asked(prompt)}) == 1
        left = secure.plays(ROLE, chunk("a"), HANG)
        async with app.stream(left) as source:
            await anext(source.aiter_sse())
        await wait_until(lambda: secure.asked(left)[0].canceled.is_set(), 1)


async def test_an_authority_nobody_trusts(launch: Launch, secure: FakeProvider, backend: FakeAppBackend) -> None:
    async with launch(GATEWAY_PROVIDER_URL=f"https://localhost:{secure.port}/v1") as gw:
        app = await gw.app(backend)
        refused(await app.ask("x"), 502, "PROVIDER_UNREACHABLE")
        assert secure.exchanges == []
        assert await app.account.settled() == 0


async def test_a_certificate_of_another_name(launch: Launch, backend: FakeAppBackend, tmp_path: Path) -> None:
    file = certificate(tmp_path, "elsewhere.example")
    async with FakeProvider(serving(file)) as impostor:
        url = f"https://localhost:{impostor.port}/v1"
        async with launch(GATEWAY_PROVIDER_URL=url, GATEWAY_CA_FILE=str(file)) as gw:
            refused(await (await gw.app(backend)).ask("x"), 502, "PROVIDER_UNREACHABLE")
            assert impostor.exchanges == []
