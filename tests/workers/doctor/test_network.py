"""The rows about addresses and other servers."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.settings import Settings
from tests.fakes.identity import FakeIdentityProvider
from tests.fakes.mail_server import MailServer
from tests.fakes.receiver import certificate
from tests.fakes.server import FakeServer, answer
from tests.support.redis_servers import free_port
from workers.doctor import network
from workers.doctor.row import Row


async def check(checked: Callable[[Settings], AsyncIterator[Row]], **settings: str | bool) -> Row:
    (row,) = [row async for row in checked(Settings(**settings))]
    assert bool(row.action) == (row.state != "ok"), row
    return row


@pytest.mark.parametrize(
    ("days", "trusted", "state"), [(9, True, "ok"), (1, True, "warn"), (9, False, "fail"), (-1, True, "fail")]
)
async def test_tls(days: int, trusted: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, authority = certificate(tmp_path, "receiver.example.com", days=days)
    connect = asyncio.open_connection
    monkeypatch.setattr(
        asyncio,
        "open_connection",
        lambda host, port, ssl: connect("127.0.0.1", port, ssl=ssl, server_hostname=host),
    )
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as server:
        address = f"https://receiver.example.com:{server.sockets[0].getsockname()[1]}"
        row = await check(network.check_address, base_url=address, ca_file=authority if trusted else "")
    assert row.state == state, row
    assert ("1.0 days" in row.detail) == (state == "warn")


async def test_an_upstream_where_nothing_listens(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    assert (await check(network.check_upstream, upstream=f"unix/{path}")).state == "warn"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert (await check(network.check_upstream, upstream=f"unix/{path}")).state == "ok"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert (await check(network.check_upstream, upstream=address)).state == "ok"
    assert (await check(network.check_upstream, upstream=address)).state == "warn"


async def test_an_identity_provider_that_cannot_be_used() -> None:
    async with FakeIdentityProvider() as provider:
        issuer = provider.address
        row = await check(network.check_sign_in, oidc_issuer=issuer)
        assert row == Row("sign-in", "ok", f"{issuer} answers")
        provider.metadata = {"issuer": "https://other.example"}
        assert (await check(network.check_sign_in, oidc_issuer=issuer)).state == "fail"
    row = await check(network.check_sign_in, oidc_issuer=f"http://127.0.0.1:{free_port()}")
    assert row.state == "fail"


async def test_a_mail_server_that_takes_nothing_or_refuses_the_password() -> None:
    async with MailServer(log_in=True) as server:
        assert (await check(network.check_mail_server, smtp_url=server.url)).state == "ok"
        wrong = f"smtp://ada:the-password@127.0.0.1:{server.port}"
        row = await check(network.check_mail_server, smtp_url=wrong)
        assert (row.state, row.detail) == ("fail", "takes no notices: SMTPAuthenticationError with 535")
        assert "the-password" not in repr(row)
        assert not server.messages
    row = await check(network.check_mail_server, smtp_url=server.url)
    assert (row.state, row.detail) == ("fail", "takes no notices: ConnectionRefusedError")


async def test_a_mail_server_without_the_tls_it_should_have(tls: tuple[ssl.SSLContext, str]) -> None:
    async with MailServer(tls[0], smtps=True) as server:
        assert (await check(network.check_mail_server, smtp_url=server.url, ca_file=tls[1])).state == "ok"
        assert (await check(network.check_mail_server, smtp_url=server.url)).state == "fail"


async def test_a_probe_check_that_voids_all_probes() -> None:
    async with FakeServer() as server:
        server.reply = answer(200)
        url = server.address
        row = await check(network.check_probe_address, probe_check_url=url, allow_private_addresses=True)
        assert row.state == "ok"
        assert (await check(network.check_probe_address, probe_check_url=url)).state == "fail"  # a private address
        server.reply = answer(503)
        row = await check(network.check_probe_address, probe_check_url=url, allow_private_addresses=True)
        assert row.state == "fail"
    row = await check(network.check_probe_address, probe_check_url=url, allow_private_addresses=True)
    assert row.state == "fail"
