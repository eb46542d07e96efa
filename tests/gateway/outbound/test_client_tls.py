"""Calls over TLS, and calls to names whose addresses change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path

import pytest

from gateway.outbound.addresses import BlockedAddress
from gateway.outbound.client import Client
from tests.fakes.receiver import certificate
from tests.gateway.outbound.origins import OK, Names, Recorder, Serve, answering, failure, forever


async def test_tls_is_verified_for_the_name(serve: Serve, tmp_path: Path) -> None:
    context, trusted = certificate(tmp_path, "receiver.example.com")
    asked_for: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: asked_for.append(name)
    server = Recorder()
    port = await serve(server, context)
    names = Names({"receiver.example.com": [["127.0.0.1"]], "other.example.com": [["127.0.0.1"]]})
    async with Client(allow_private=True, ca_file=trusted, resolve=names.resolve) as client:
        url = f"https://receiver.example.com.:{port}/"
        for _ in range(2):
            assert (await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=9)).status == 200
        assert (asked_for, server.connections) == (["receiver.example.com"], 1), "one handshake"
        assert f"\r\nHost: receiver.example.com:{port}\r\n".encode() in server.requests[0]
        failed = await failure(client, f"https://other.example.com:{port}/s3cret")
        assert failed.reason == "tls"
        assert "not valid for 'other.example.com'" in str(failed)
        assert (await failure(client, f"https://127.0.0.1:{port}/s3cret")).reason == "tls"
    async with Client(allow_private=True, resolve=names.resolve) as stranger:
        failed = await failure(stranger, f"https://receiver.example.com:{port}/s3cret")
        assert (failed.reason, "self-signed certificate" in str(failed)) == ("tls", True)
    assert len(server.requests) == 2, "nothing is sent before the certificate is verified"


async def test_bad_tls(serve: Serve, tmp_path: Path) -> None:
    context, trusted = certificate(tmp_path, "old.example.com", days=-1)
    names = Names({"old.example.com": [["127.0.0.1"]]})
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read(99_999)
        await reader.read()
        gone.set()

    async with Client(allow_private=True, ca_file=trusted, resolve=names.resolve) as client:
        failed = await failure(client, f"https://old.example.com:{await serve(Recorder(), context)}/s3cret")
        assert (failed.reason, "expired" in str(failed)) == ("tls", True)
        plain = await serve(answering(OK, then=forever))
        assert (await failure(client, f"https://old.example.com:{plain}/s3cret", budget=1)).reason in ("tls", "timeout")
        hanging = await serve(silent)
        assert (await failure(client, f"https://old.example.com:{hanging}/s3cret", budget=0.3)).reason == "timeout"
        await asyncio.wait_for(gone.wait(), 5)  # a canceled handshake closes its socket


async def test_tls_that_breaks_after_the_handshake(serve: Serve, tmp_path: Path) -> None:
    context, trusted = certificate(tmp_path, "forged.example.com")
    names = Names({"forged.example.com": [["127.0.0.1"]]})

    async def forge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        os.write(writer.get_extra_info("socket").fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
        await forever()

    async with Client(allow_private=True, ca_file=trusted, resolve=names.resolve) as client:
        url = f"https://forged.example.com:{await serve(forge, context)}/s3cret"
        assert (await failure(client, url)).reason == "tls"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_server_that_demands_a_certificate(tmp_path: Path, version: ssl.TLSVersion) -> None:
    """With TLS 1.3, its refusal arrives after the handshake, while the request is being sent."""
    context, trusted = certificate(tmp_path, "strict.example.com")
    context.maximum_version, context.verify_mode = version, ssl.CERT_REQUIRED
    context.load_verify_locations(trusted)
    names = Names({"strict.example.com": [["127.0.0.1"]]})

    def refuse() -> None:
        connection, _ = listener.accept()
        with context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False) as secured:
            with contextlib.suppress(ssl.SSLError):
                secured.do_handshake()
            while socket.socket.recv(secured, 65_536):  # otherwise closing it would discard the refusal
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(asyncio.to_thread(refuse))
        async with Client(allow_private=True, ca_file=trusted, resolve=names.resolve) as client:
            url = f"https://strict.example.com:{listener.getsockname()[1]}/s3cret"
            assert (await failure(client, url)).reason == "tls"
        await serving


async def test_a_name_that_changes_between_check_and_connection_gains_nothing(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, trusted = certificate(tmp_path, "rebind.example.com")
    closing = OK.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    port = await serve(answering(closing), context)
    names = Names({"rebind.example.com": [["93.184.215.14"], ["93.184.215.14", "127.0.0.1"], ["127.0.0.1"]]})
    dialled: list[str] = []
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    async def to_loopback(sock: socket.socket, address: tuple[str, int]) -> None:
        dialled.append(address[0])
        await connect(sock, ("127.0.0.1", address[1]))

    def no_second_look_up(*_: object, **__: object) -> None:
        raise AssertionError("looked up again")

    monkeypatch.setattr(loop, "sock_connect", to_loopback)
    monkeypatch.setattr(socket, "getaddrinfo", no_second_look_up)
    url = f"https://rebind.example.com:{port}/"
    async with Client(allow_private=False, ca_file=trusted, resolve=names.resolve) as client:
        assert (await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=9)).status == 200
        assert (names.asked, dialled) == (["rebind.example.com."], ["93.184.215.14"])
        assert (await failure(client, url)).reason == "blocked", "one private address refuses the name"
        with pytest.raises(BlockedAddress):
            await client.send("GET", url, tenant="acc", budget=5)
    assert dialled == ["93.184.215.14"], "not even a connection"
