"""The daily check of verified custom domains, against a DNS server over UDP."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import dns.rcode
import pytest
import pytest_asyncio
from msgspec.structs import replace

from gateway.accounts.custom_domains import MISSING_SECONDS
from gateway.accounts.domain_names import record_name, verification_token
from gateway.accounts.records import App
from gateway.ids import new_id
from gateway.keys import domain_check_key, domain_checks_key, domain_key, partition_tag
from gateway.redis.scripts import compare_and_set
from gateway.settings import Settings
from tests.support.background import cancel
from tests.support.dns_server import DnsServer, dns_server
from tests.support.monitored_apps import Fleet, Watched, fleet
from tests.support.polling import wait_until
from workers.monitors.domains import Domains, judge

pytestmark = pytest.mark.asyncio(loop_scope="session")

DAY_MS = 86_400_000
NOW = 1_782_979_200_000


@pytest_asyncio.fixture(loop_scope="session")
async def own(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as running:
        yield running


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
    fields = {"customDomain": domain, "customDomainVerified": True, "customDomainProven": proven, **fields}
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


async def passes(watched: Watched, milliseconds: int) -> None:
    """Moves the time since which the record is missing into the past.

    The new version makes Redis refuse the observation of a check that is under way, which would move it back.
    """
    tag = partition_tag(watched.account.id)
    client, key = watched.fleet.queue.store.client, domain_check_key(tag, watched.app.id)
    since = int(await client.hget(key, "missingSince")) - milliseconds
    await client.hset(key, mapping={"missingSince": since, "version": new_id("ver")})


async def asked(resolver: DnsServer, watched: Watched, times: int = 3) -> None:
    """Waits for `times` further questions."""
    name = record_name(watched.app.customDomain or "")
    until = resolver.asked.count(name) + times
    await wait_until(lambda: resolver.asked.count(name) >= until, 20)


async def test_seven_days_without_the_record() -> None:
    known: dict[str, str] = {}
    for day, missing, since, lost in (
        (0, False, "", False),
        (1, True, str(NOW + DAY_MS), False),
        (5, True, str(NOW + DAY_MS), False),
        (6, False, "", False),  # it was there again: the time starts over
        (7, True, str(NOW + 7 * DAY_MS), False),
        (13, True, str(NOW + 7 * DAY_MS), False),
        (14, True, str(NOW + 7 * DAY_MS), True),
    ):
        known, judged = judge(known, "a.example", NOW + day * DAY_MS, missing=missing)
        assert (known, judged) == ({"domain": "a.example", "missingSince": since}, lost), day
    # Another domain's time does not count.
    assert judge(known, "b.example", NOW + 99 * DAY_MS, missing=True)[1] is False
    assert MISSING_SECONDS * 1000 == 7 * DAY_MS


async def test_a_domain_whose_record_is_gone_is_withdrawn(own: Fleet, resolver: DnsServer) -> None:
    kept, lost, other = [await an_app(own, resolver) for _ in range(3)]
    operators, unproven = await an_app(own, proven=False), await an_app(own, proven=False, customDomainVerified=False)
    async with checking(own, resolver, workers=2):
        resolver.sets(record_name(lost.app.customDomain))
        resolver.sets(record_name(other.app.customDomain), "another value")
        for each in (lost, other):
            await wait_until(lambda each=each: known(each), 10, holds=lambda found: bool(found.get("missingSince")))
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
    assert await known(kept) == {**await known(kept), "domain": kept.app.customDomain, "missingSince": ""}
    for each in (operators, unproven):
        assert await present(each) == each.app
        assert record_name(each.app.customDomain) not in resolver.asked
    assert lost.types() == []


async def test_a_dns_that_fails_changes_nothing(own: Fleet, resolver: DnsServer) -> None:
    app = await an_app(own)
    name = record_name(app.app.customDomain or "")
    async with checking(own, resolver):
        await wait_until(lambda: known(app), 10, holds=lambda found: bool(found.get("missingSince")))
        resolver.failing[name] = dns.rcode.SERVFAIL
        await asked(resolver, app, 2)
        await passes(app, 30 * DAY_MS)
        before = await known(app)
        await asked(resolver, app)
        assert (await present(app)).customDomainVerified
        assert await known(app) == before
        resolver.sets(name, verification_token(app.app, app.app.customDomain or ""))
        await wait_until(lambda: known(app), 10, holds=lambda found: found.get("missingSince") == "")
    assert (await present(app)).customDomainVerified


async def test_a_claim_that_redis_lost_is_renewed(own: Fleet, resolver: DnsServer) -> None:
    app = await an_app(own, resolver)
    key = domain_key(app.app.customDomain or "")
    await compare_and_set(own.queue.store, key, "")
    async with checking(own, resolver):
        await wait_until(lambda: own.queue.store.get(key), 10, holds=lambda claim: str(claim).startswith(app.app.id))


async def test_an_app_that_lost_its_claim_to_another(own: Fleet, resolver: DnsServer) -> None:
    app = await an_app(own, resolver)
    domain = app.app.customDomain or ""
    await compare_and_set(own.queue.store, domain_key(domain), "")
    other = await an_app(own, customDomain=domain)
    resolver.sets(record_name(domain), *(verification_token(each.app, domain) for each in (app, other)))
    async with checking(own, resolver):
        await wait_until(lambda: present(app), 10, holds=lambda found: not found.customDomainVerified)
        await asked(resolver, other)
    assert (await present(other)).customDomainVerified
    assert (await own.registry.domains.find_owner(domain)) == await present(other)


async def test_a_removed_domain_and_a_deleted_app(own: Fleet, resolver: DnsServer) -> None:
    changed, deleted = await an_app(own, resolver), await an_app(own, resolver)
    async with checking(own, resolver):
        for each in (changed, deleted):
            await wait_until(lambda each=each: known(each), 10)
        await own.registry.put_app(replace(changed.app, customDomain=None, customDomainVerified=False), changed.app)
        await own.registry.delete_app(deleted.app)
        for each in (changed, deleted):
            await wait_until(lambda each=each: known(each), 10, holds=lambda found: found == {})
    tag = partition_tag(deleted.account.id)
    assert await own.queue.store.client.zscore(domain_checks_key(tag), deleted.app.id) is None


async def test_the_worker_checks_domains(own: Fleet, resolver: DnsServer) -> None:
    app = await an_app(own, resolver)
    await own.worker("monitors", GATEWAY_DNS=resolver.address)
    await wait_until(lambda: record_name(app.app.customDomain or "") in resolver.asked, 20)
    await wait_until(lambda: known(app), 10, holds=lambda found: found.get("missingSince") == "")
