"""Inspections of certificates, by real handshakes with servers that present certificates made here."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from cryptography import x509

from gateway.accounts.domain_observations import Certificate, read_certificates
from gateway.accounts.records import App, Domain, replace_domains
from gateway.events.catalog import DomainExpiring
from gateway.ids import now_iso
from gateway.keys import bodies_key, certificate_key, certificates_key, partition_tag, stream_key
from gateway.operations.needs_attention import count_expiring_certificates
from gateway.outbound.addresses import CallFailed
from gateway.settings import Settings
from tests.fakes.receiver import certificate
from tests.support.background import cancel
from tests.support.monitored_apps import Fleet, Watched
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from workers.monitors.certificates import (
    DAY_MS,
    NOTICE_MS,
    REMEMBERED_FINGERPRINTS,
    Certificates,
    evaluate_certificate,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

DOMAIN = "shop.example.com"
NOW = 1_782_979_200_000


def made(folder: Path, days: float, domain: str = DOMAIN) -> tuple[ssl.SSLContext, int]:
    """Makes a self-signed certificate that expires in so many days. Returns it, and the time of its end in ms."""
    context, file = certificate(folder, domain, days=days)
    ends = x509.load_pem_x509_certificate(Path(file).read_bytes()).not_valid_after_utc
    return context, int(ends.timestamp() * 1000)


class Edge:
    """A TLS server for all custom domains. A test sets the certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contexts: dict[str, ssl.SSLContext] = {}
        self.asked: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator["Edge"]:
        """Answers meanwhile. Before, connections wait for the handshake."""
        front, _ = made(self.folder, 90, "nobody.example")

        def choose(tls: ssl.SSLObject, name: str, _: ssl.SSLContext) -> int | None:
            self.asked.append(name)
            if name not in self.contexts:
                return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            tls.context = self.contexts[name]
            return None

        front.sni_callback = choose  # type: ignore[assignment]
        server = await asyncio.start_server(lambda _, writer: writer.close(), sock=self._socket, ssl=front)
        try:
            yield self
        finally:
            server.close()

    def shows(self, domain: str, days: float) -> int:
        """Presents a new certificate for the domain. Returns the time of its end in ms."""
        self.contexts[domain], ends = made(self.folder, days, domain)
        return ends


@pytest_asyncio.fixture(loop_scope="session")
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Edge(tmp_path).answering() as edge:
        yield edge


@contextlib.asynccontextmanager
async def inspecting(own: Fleet, edge: Edge, workers: int = 1, interval: float = 86_400) -> AsyncIterator[None]:
    """Inspects in this process."""
    settings = Settings(redis_url=own.queue.url, certificate_address=edge.address, certificate_interval=interval)
    tasks = [asyncio.create_task(Certificates(settings, own.registry).run()) for _ in range(workers)]
    try:
        yield
    finally:
        await cancel(*tasks)


async def app_of(own: Fleet, domain: str, *, verified: bool = True, **fields: Any) -> Watched:
    return await own.app(domains=(Domain(domain, verified),), **fields)


async def known(app: Watched) -> dict[str, str]:
    client = app.fleet.queue.store.client
    return await client.hgetall(certificate_key(partition_tag(app.account.id), app.app.id))


async def notices(app: Watched) -> list[dict[str, Any]]:
    """Returns the data of the app's events, which wait for their delivery."""
    client, account = app.fleet.queue.store.client, app.account.id
    entries = await client.xrange(stream_key(partition_tag(account), "events"))
    mine = [fields for _, fields in entries if fields["account"] == account]
    assert {fields["type"] for fields in mine} <= {"domain.expiring"}
    return [json.loads(await client.hget(bodies_key(account), fields["id"])) for fields in mine]


async def notified(app: Watched, *domains: str) -> None:
    await wait_until(lambda: notices(app), 10, holds=lambda data: [each["domain"] for each in data] == list(domains))


# By two workers


async def test_the_account_is_notified_once_per_certificate_within_seven_days(own: Fleet, edge: Edge) -> None:
    far, near, over = [await app_of(own, f"{name}.example.com") for name in ("far", "near", "over")]
    never, plain = await app_of(own, "unverified.example.com", verified=False), await own.app()
    free = await app_of(own, "free.example.com", plan="free", live=False)
    ends = {
        app: edge.shows(str(app.app.customDomain), days) for app, days in ((far, 8), (near, 6.5), (over, -1), (free, 3))
    }
    async with inspecting(own, edge, workers=2, interval=0.1):
        for app, left in ((near, 6), (over, 0), (free, 2)):
            [data] = await wait_until(lambda app=app: notices(app), 10)
            same = {"appId": app.app.id, "appName": app.app.name, "domain": app.app.customDomain}
            assert data == {**same, "expiresAt": now_iso(ends[app] / 1000), "daysLeft": left}
        inspections = len(edge.asked)
        await wait_until(lambda: len(edge.asked) >= inspections + 20, 10)
        assert [len(await notices(app)) for app in (far, never, plain, near, over, free)] == [0, 0, 0, 1, 1, 1]
        assert await known(never) == await known(plain) == {}
        assert (await known(far))["expiresAt"] == str(ends[far])
        [certificate] = read_certificates(await known(far)).values()
        assert certificate.issuer == far.app.customDomain  # it is self-signed
        seconds, _ = await own.queue.store.client.time()
        assert await count_expiring_certificates(own.queue.store, seconds * 1000) == 3  # for operators
        # A renewed certificate causes no event until its own end is near.
        ends[near] = edge.shows("near.example.com", 90)
        await wait_until(lambda: known(near), 10, holds=lambda found: found["expiresAt"] == str(ends[near]))
    assert len(await notices(near)) == 1
    edge.shows("near.example.com", 1)
    async with inspecting(own, edge, interval=0.1):
        await notified(near, "near.example.com", "near.example.com")
    assert (await notices(near))[1]["daysLeft"] == 0
    assert len(await notices(over)) == 1, "a restart repeats no event"


def at_domains(app: Watched, *names: str) -> App:
    return replace_domains(app.app, [Domain(name, verified=True) for name in names])


async def test_a_domain_that_is_changed_during_an_inspection_is_inspected_next(own: Fleet, tmp_path: Path) -> None:
    app, edge = await app_of(own, "one.example.com"), Edge(tmp_path)
    edge.shows("one.example.com", 8)
    edge.shows("two.example.com", 2)
    client, tag = own.queue.store.client, partition_tag(app.account.id)
    async with inspecting(own, edge):  # once a day
        await wait_until(lambda: client.zscore(certificates_key(tag), app.app.id), 10)  # 0 until an inspection begins
        changed = at_domains(app, "two.example.com")
        await own.registry.put_app(changed, app.app)
        async with edge.answering():
            await notified(app, "two.example.com")
            await own.registry.put_app(at_domains(app), changed)
            await wait_until(lambda: known(app), 10, holds=lambda found: found == {})


async def test_several_domains_of_an_app(own: Fleet, edge: Edge) -> None:
    app = await app_of(own, "one.example.com")
    ends = [edge.shows(f"{name}.example.com", days) for name, days in (("one", 3), ("two", 2), ("three", 90))]
    await own.registry.put_app(at_domains(app, "one.example.com", "two.example.com", "no.example.com"), app.app)
    # A record of the version before, which has notified the account of the first domain's certificate.
    fingerprint = (await read_certificate(own, edge.address, "one.example.com")).fingerprint
    tag = partition_tag(app.account.id)
    before = {"domain": "one.example.com", "fingerprint": fingerprint, "expiresAt": str(ends[0]), "issuer": ""}
    before |= {"notified": json.dumps([fingerprint]), "version": "1"}
    await own.queue.store.client.hset(certificate_key(tag, app.app.id), mapping=before)

    async with inspecting(own, edge, interval=0.1):
        await notified(app, "two.example.com")
        found = read_certificates(await known(app))
        assert {name: each.expires for name, each in found.items()} == {
            "one.example.com": ends[0],
            "two.example.com": ends[1],
        }
        assert (await known(app))["expiresAt"] == str(ends[1]), "the one that ends first"
        seconds, _ = await own.queue.store.client.time()
        assert await count_expiring_certificates(own.queue.store, seconds * 1000) == 1
        # One that cannot be reached for now keeps its certificate.
        del edge.contexts["two.example.com"]
        ends[0] = edge.shows("one.example.com", 60)
        await wait_until(lambda: known(app), 10, holds=lambda record: str(ends[0]) in record["certificates"])
        assert read_certificates(await known(app))["two.example.com"].expires == ends[1]
    assert len(await notices(app)) == 1


async def test_after_a_start_every_certificate_is_inspected_soon(own: Fleet, edge: Edge) -> None:
    app = await app_of(own, DOMAIN)
    edge.shows(DOMAIN, 30)
    client, key = own.queue.store.client, certificates_key(partition_tag(app.account.id))
    seconds, _ = await client.time()
    later, sooner = (seconds + 80_000) * 1000, (seconds + 60) * 1000
    await client.zadd(key, {app.app.id: later, "sooner": sooner})
    inspecting = Certificates(Settings(redis_url=own.queue.url), own.registry)
    for _ in range(2):  # a second worker finds nothing to do
        await inspecting._bring_forward()
        due = dict(await client.zrange(key, 0, -1, withscores=True))
        assert due["sooner"] == sooner
        assert 590 <= due[app.app.id] / 1000 - seconds <= 610
    await client.zrem(key, "sooner")


# One inspection


async def read_certificate(own: Fleet, address: str, domain: str = DOMAIN, **limits: float) -> Certificate:
    settings = Settings(redis_url=own.queue.url, certificate_address=address)
    return await Certificates(settings, own.registry, **limits)._read_certificate("acc", domain)


def presenting_an_unknown_version(folder: Path) -> ssl.SSLContext:
    """OpenSSL presents the certificate, and cryptography refuses it with an error that is no ValueError."""
    _, file = certificate(folder, DOMAIN)
    pem = Path(file).read_text()
    start = pem.index("-----BEGIN CERTIFICATE")
    encoded, version = ssl.PEM_cert_to_DER_cert(pem[start:]), b"\xa0\x03\x02\x01"
    second = encoded.replace(version + b"\x02", version + b"\x01", 1)
    Path(file).write_text(pem[:start] + ssl.DER_cert_to_PEM_cert(second))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    return context


async def test_the_reasons_why_a_domain_cannot_be_inspected(own: Fleet, tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    odd = presenting_an_unknown_version(tmp_path)
    async with (
        await asyncio.start_server(silent, "127.0.0.1", 0) as mute,
        await asyncio.start_server(talks, "127.0.0.1", 0) as plain,
        await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=odd) as unknown,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (plain, unknown, mute)]
        for address, domain, reason in (
            (f"127.0.0.1:{ports[0]}", DOMAIN, "tls"),
            (f"127.0.0.1:{ports[1]}", DOMAIN, "tls"),
            (f"127.0.0.1:{ports[2]}", DOMAIN, "timeout"),
            (f"127.0.0.1:{free_port()}", DOMAIN, "connect"),
            ("no-such-host.invalid:443", DOMAIN, "dns"),
            ("", "localhost", "blocked"),  # an internal address is not called
        ):
            with pytest.raises(CallFailed) as failure:
                await read_certificate(own, address, domain, budget_seconds=0.3)
            assert failure.value.reason == reason, address


# The pure function


def seen(days: float, fingerprint: str = "a") -> Certificate:
    return Certificate(fingerprint, NOW + int(days * DAY_MS))


@pytest.mark.parametrize(("days", "left"), [(7, 7), (6.99, 6), (1, 1), (0.99, 0), (0, 0), (-30, 0)])
async def test_the_remaining_days(days: float, left: int) -> None:
    _, event = evaluate_certificate(None, DOMAIN, seen(days), NOW)
    assert event == DomainExpiring(domain=DOMAIN, expiresAt=now_iso((NOW + days * DAY_MS) / 1000), daysLeft=left)
    assert evaluate_certificate(None, DOMAIN, Certificate("a", NOW + NOTICE_MS + 1), NOW)[1] is None


async def test_one_event_per_certificate_even_if_a_domain_alternates_between_several() -> None:
    record: Certificate | None = None
    notified = []
    for fingerprint, days in [("a", 3), ("b", 4), ("a", 3), ("c", 90), ("b", 4), ("c", 5), ("a", 1)]:
        record, event = evaluate_certificate(record, DOMAIN, seen(days, fingerprint), NOW)
        notified += [fingerprint] if event else []
    assert notified == ["a", "b", "c"]
    for number in range(50):
        record, _ = evaluate_certificate(record, DOMAIN, seen(1, str(number)), NOW)
    assert record is not None
    assert len(record.notified) == REMEMBERED_FINGERPRINTS
