"""The daily check of verified custom domains, against a DNS server over UDP."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import dns.rcode
import pytest
import pytest_asyncio

from gateway.accounts.custom_domains import MISSING_SECONDS
from gateway.accounts.domain_names import record_name, verification_token
from gateway.accounts.domain_observations import read_missing, write_missing
from gateway.accounts.records import App, Domain, replace_domains
from gateway.ids import new_id
from gateway.keys import domain_check_key, domain_checks_key, domain_key, partition_tag
from gateway.redis.scripts import compare_and_set
from gateway.settings import Settings
from tests.support.background import cancel
from tests.support.dns_server import DnsServer, dns_server
from tests.support.monitored_apps import Fleet, Watched
from tests.support.polling import wait_until
from workers.monitors.domains import Domains, judge

pytestmark = pytest.mark.asyncio(loop_scope="session")

DAY_MS = 86_400_000
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


async def test_a_dns_that_fails_changes_nothing(own: Fleet, resolver: DnsServer) -> None:
    app = await an_app(own)
    name = record_name(app.app.customDomain or "")
    async with checking(own, resolver):
        await wait_until(lambda: missing(app), 10)
        resolver.failing[name] = dns.rcode.SERVFAIL
        await asked(resolver, app, 2)
        await passes(app, 30 * DAY_MS)
        before = await known(app)
        await asked(resolver, app)
        assert (await present(app)).customDomainVerified
        assert await known(app) == before
        resolver.sets(name, verification_token(app.app, app.app.customDomain or ""))
        await wait_until(lambda: missing(app), 10, holds=lambda found: found == {})
    assert (await present(app)).customDomainVerified


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
