"""The daily checks of custom domains: of their records, by a DNS server, and of their certificates, by handshakes."""

import asyncio
import contextlib
import json
import secrets
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import dns.rcode
import pytest
import pytest_asyncio
from cryptography import x509

from gateway.accounts.custom_domains import MISSING_SECONDS
from gateway.accounts.domain_names import record_name, verification_token
from gateway.accounts.domain_observations import Certificate, read_certificates, read_missing, write_missing
from gateway.accounts.records import App, Domain, replace_domains
from gateway.events.catalog import DomainExpiring
from gateway.ids import new_id, now_iso
from gateway.keys import (
    bodies_key,
    certificate_key,
    domain_check_key,
    domain_checks_key,
    domain_key,
    partition_tag,
    stream_key,
)
from gateway.operations.needs_attention import count_expiring_certificates
from gateway.outbound.addresses import CallFailed
from gateway.redis.scripts import compare_and_set
from gateway.settings import Settings
from tests.fakes.receiver import certificate
from tests.support.background import cancel
from tests.support.dns_server import DnsServer, dns_server
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
from workers.monitors.domains import Domains, judge

pytestmark = pytest.mark.asyncio(loop_scope="session")

DOMAIN = "shop.example.com"
NOW = 1_782_979_200_000


@pytest_asyncio.fixture(loop_scope="session")
async def resolver() -> AsyncIterator[DnsServer]:
    async with dns_server() as server:
        yield server


@contextlib.asynccontextmanager
async def checking(own: Fleet, resolver: DnsServer, workers: int = 1) -> AsyncIterator[None]:
    """Checks every domain ten times per second."""
    settings = Settings(redis_url=own.queue.url, dns=resolver.address)
    tasks = [asyncio.create_task(Domains(settings, own.registry, interval=0.1).run()) for _ in range(workers)]
    try:
        yield
    finally:
        await cancel(*tasks)


async def an_app(own: Fleet, resolver: DnsServer | None = None, *, proven: bool = True, **fields: Any) -> Watched:
    """Creates an app with a verified domain, whose record is in the DNS if a server is given."""
    domain = f"{secrets.token_hex(4)}.example.com"
    fields = {"domains": (Domain(domain, verified=True, proven=proven),), **fields}
    watched = await own.app(**fields)
    if resolver is not None:
        resolver.sets(record_name(domain), verification_token(watched.app, domain))
    return watched


async def present(watched: Watched) -> App:
    found = await watched.fleet.registry.find_app(watched.app.id)
    assert found is not None
    return found


async def known(watched: Watched) -> dict[str, str]:
    client = watched.fleet.queue.store.client
    return await client.hgetall(domain_check_key(partition_tag(watched.account.id), watched.app.id))


async def missing(watched: Watched) -> dict[str, int]:
    return read_missing(await known(watched))


async def passes(watched: Watched, milliseconds: int) -> None:
    """Moves the time since which the record is missing into the past.

    The new version makes Redis refuse the observation of a check that is under way, which would move it back.
    """
    tag = partition_tag(watched.account.id)
    client, key = watched.fleet.queue.store.client, domain_check_key(tag, watched.app.id)
    since = {name: at - milliseconds for name, at in (await missing(watched)).items()}
    await client.hset(key, mapping={**write_missing(since), "version": new_id("ver")})


async def asked(resolver: DnsServer, watched: Watched, times: int = 3) -> None:
    """Waits for `times` further questions."""
    name = record_name(watched.app.customDomain or "")
    until = resolver.asked.count(name) + times
    await wait_until(lambda: resolver.asked.count(name) >= until, 20)


async def test_seven_days_without_the_record() -> None:
    known: dict[str, int] = {}
    gone, there = "There is no TXT record", ""
    for day, found, since, lost in (
        (0, there, None, False),
        (1, gone, NOW + DAY_MS, False),
        (5, gone, NOW + DAY_MS, False),
        (6, there, None, False),  # it was there again: the time starts over
        (7, gone, NOW + 7 * DAY_MS, False),
        (13, gone, NOW + 7 * DAY_MS, False),
        (14, None, NOW + 7 * DAY_MS, False),  # the DNS did not answer
        (15, gone, NOW + 7 * DAY_MS, True),
    ):
        answers = {} if found is None else {"a.example": found}
        known, judged = judge(known, ["a.example"], answers, NOW + day * DAY_MS)
        assert (known, judged) == ({} if since is None else {"a.example": since}, {"a.example"} if lost else set()), day
    # Each domain has its own time, and that of a former one does not count.
    answers = {"b.example": gone, "c.example": there}
    known, judged = judge({**known, "c.example": NOW}, ["b.example", "c.example"], answers, NOW + 99 * DAY_MS)
    assert (known, judged) == ({"b.example": NOW + 99 * DAY_MS}, set())
    assert MISSING_SECONDS * 1000 == 7 * DAY_MS


async def test_a_domain_whose_record_is_gone_is_withdrawn(own: Fleet, resolver: DnsServer) -> None:
    kept, lost, other = [await an_app(own, resolver) for _ in range(3)]
    operators, unproven = await an_app(own, proven=False), await an_app(own, domains=(Domain("not.example.com"),))
    async with checking(own, resolver, workers=2):
        resolver.sets(record_name(lost.app.customDomain))
        resolver.sets(record_name(other.app.customDomain), "another value")
        for each in (lost, other):
            await wait_until(lambda each=each: missing(each), 10)
            await passes(each, 6 * DAY_MS)
            await asked(resolver, each)
            assert (await present(each)).customDomainVerified
            await passes(each, DAY_MS)
            await wait_until(lambda each=each: present(each), 10, holds=lambda app: not app.customDomainVerified)
            # The domain stays the app's, unverified, and others may verify it.
            assert (await present(each)).customDomain == each.app.customDomain
            assert not (await present(each)).customDomainProven
            await wait_until(lambda each=each: known(each), 10, holds=lambda found: found == {})
            assert await own.queue.store.get(domain_key(each.app.customDomain)) is None
        await asked(resolver, kept)
    assert (await present(kept)).customDomainVerified
    assert await known(kept) == {**await known(kept), "missing": "{}"}
    for each in (operators, unproven):
        assert await present(each) == each.app
        assert record_name(each.app.customDomain) not in resolver.asked
    assert lost.types() == []


async def test_each_of_several_domains_is_withdrawn_alone(own: Fleet, resolver: DnsServer) -> None:
    names = [f"{part}-{secrets.token_hex(4)}.example.com" for part in ("kept", "lost", "silent", "operators")]
    kept, lost, silent, operators = names
    domains = [Domain(name, verified=True, proven=name != operators) for name in names]
    app = await own.app(domains=tuple(domains))
    resolver.sets(record_name(kept), verification_token(app.app, kept))
    # A record of the version before knows one domain.
    key, long_ago = domain_check_key(partition_tag(app.account.id), app.app.id), NOW - 365 * DAY_MS
    before = {"domain": silent, "missingSince": str(long_ago), "version": "1"}
    await own.queue.store.client.hset(key, mapping=before)
    resolver.failing[record_name(silent)] = dns.rcode.SERVFAIL
    async with checking(own, resolver):
        await wait_until(lambda: missing(app), holds=lambda found: lost in found)
        assert (await missing(app))[silent] == long_ago, "the DNS has not answered"
        await passes(app, 8 * DAY_MS)
        await wait_until(lambda: present(app), holds=lambda app: lost not in app.verified_domains)
        assert (await present(app)).domains == (domains[0], Domain(lost), *domains[2:])
        assert [await own.queue.store.get(domain_key(name)) is None for name in names] == [False, True, False, False]
        resolver.sets(record_name(silent), verification_token(app.app, silent))
        await wait_until(lambda: missing(app), holds=lambda found: found == {})
    assert (await present(app)).verified_domains == (kept, silent, operators)


async def test_a_claim_that_redis_lost_is_renewed_unless_another_app_has_the_domain(
    own: Fleet, resolver: DnsServer
) -> None:
    kept, app = await an_app(own, resolver), await an_app(own, resolver)
    domain, key = app.app.customDomain or "", domain_key(kept.app.customDomain or "")
    for lost in (key, domain_key(domain)):
        await compare_and_set(own.queue.store, lost, "")
    other = await an_app(own, domains=app.app.domains)
    resolver.sets(record_name(domain), *(verification_token(each.app, domain) for each in (app, other)))
    async with checking(own, resolver):
        await wait_until(lambda: own.queue.store.get(key), 10, holds=lambda claim: str(claim).startswith(kept.app.id))
        await wait_until(lambda: present(app), 10, holds=lambda found: not found.customDomainVerified)
        await asked(resolver, other)
    assert (await present(other)).customDomainVerified
    assert (await own.registry.domains.find_owner(domain)) == await present(other)


async def test_a_removed_domain_and_a_deleted_app(own: Fleet, resolver: DnsServer) -> None:
    changed, deleted = await an_app(own, resolver), await an_app(own, resolver)
    async with checking(own, resolver):
        for each in (changed, deleted):
            await wait_until(lambda each=each: known(each), 10)
        await own.registry.put_app(replace_domains(changed.app, []), changed.app)
        await own.registry.delete_app(deleted.app)
        for each in (changed, deleted):
            await wait_until(lambda each=each: known(each), 10, holds=lambda found: found == {})
    tag = partition_tag(deleted.account.id)
    assert await own.queue.store.client.zscore(domain_checks_key(tag), deleted.app.id) is None


# -- certificates ----------------------------------------------------------------------------------------------


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
        self.address = ""

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator["Edge"]:
        front, _ = made(self.folder, 90, "nobody.example")

        def choose(tls: ssl.SSLObject, name: str, _: ssl.SSLContext) -> int | None:
            self.asked.append(name)
            if name not in self.contexts:
                return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            tls.context = self.contexts[name]
            return None

        front.sni_callback = choose  # type: ignore[assignment]
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=front) as server:
            self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self

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


async def record_of(app: Watched) -> dict[str, str]:
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
        assert await record_of(never) == await record_of(plain) == {}
        assert (await record_of(far))["expiresAt"] == str(ends[far])
        [certificate] = read_certificates(await record_of(far)).values()
        assert certificate.issuer == far.app.customDomain  # it is self-signed
        seconds, _ = await own.queue.store.client.time()
        assert await count_expiring_certificates(own.queue.store, seconds * 1000) == 3  # for operators
        # A renewed certificate causes no event until its own end is near.
        ends[near] = edge.shows("near.example.com", 90)
        await wait_until(lambda: record_of(near), 10, holds=lambda found: found["expiresAt"] == str(ends[near]))
    assert len(await notices(near)) == 1
    edge.shows("near.example.com", 1)
    async with inspecting(own, edge, interval=0.1):
        await notified(near, "near.example.com", "near.example.com")
    assert (await notices(near))[1]["daysLeft"] == 0
    assert len(await notices(over)) == 1, "a restart repeats no event"


async def test_several_domains_of_an_app(own: Fleet, edge: Edge) -> None:
    app = await app_of(own, "one.example.com")
    ends = [edge.shows(f"{name}.example.com", days) for name, days in (("one", 3), ("two", 2), ("three", 90))]
    domains = [Domain(f"{name}.example.com", verified=True) for name in ("one", "two", "no")]
    await own.registry.put_app(replace_domains(app.app, domains), app.app)
    # A record of the version before, which has notified the account of the first domain's certificate.
    fingerprint = (await read_certificate(own, edge.address, "one.example.com")).fingerprint
    tag = partition_tag(app.account.id)
    before = {"domain": "one.example.com", "fingerprint": fingerprint, "expiresAt": str(ends[0]), "issuer": ""}
    before |= {"notified": json.dumps([fingerprint]), "version": "1"}
    await own.queue.store.client.hset(certificate_key(tag, app.app.id), mapping=before)

    async with inspecting(own, edge, interval=0.1):
        await notified(app, "two.example.com")
        found = read_certificates(await record_of(app))
        assert {name: each.expires for name, each in found.items()} == {
            "one.example.com": ends[0],
            "two.example.com": ends[1],
        }
        assert (await record_of(app))["expiresAt"] == str(ends[1]), "the one that ends first"
        seconds, _ = await own.queue.store.client.time()
        assert await count_expiring_certificates(own.queue.store, seconds * 1000) == 1
        # One that cannot be reached for now keeps its certificate.
        del edge.contexts["two.example.com"]
        ends[0] = edge.shows("one.example.com", 60)
        await wait_until(lambda: record_of(app), 10, holds=lambda record: str(ends[0]) in record["certificates"])
        assert read_certificates(await record_of(app))["two.example.com"].expires == ends[1]
    assert len(await notices(app)) == 1


# One inspection


async def read_certificate(own: Fleet, address: str, domain: str = DOMAIN, **limits: float) -> Certificate:
    settings = Settings(redis_url=own.queue.url, certificate_address=address)
    return await Certificates(settings, own.registry, **limits)._read_certificate("acc", domain)


async def test_the_reasons_why_a_domain_cannot_be_inspected(own: Fleet) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with (
        await asyncio.start_server(silent, "127.0.0.1", 0) as mute,
        await asyncio.start_server(talks, "127.0.0.1", 0) as plain,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (plain, mute)]
        for address, domain, reason in (
            (f"127.0.0.1:{ports[0]}", DOMAIN, "tls"),
            (f"127.0.0.1:{ports[1]}", DOMAIN, "timeout"),
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
