"""Claims to verified custom domains: of apps with the same domain, one is served there."""

import asyncio
import time

import pytest
from msgspec.structs import replace

from gateway.accounts.domain_claims import CLAIM_SECONDS
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.errors import NameTaken
from gateway.keys import domain_key
from gateway.redis.scripts import compare_and_set
from tests.support.registries import an_app, process


def with_domain(name: str, domain: str = "www.example.com", *, verified: bool = True) -> App:
    return an_app(name, customDomain=domain, customDomainVerified=verified)


async def test_a_verified_domain_belongs_to_one_app(local: Registry) -> None:
    first, second = with_domain("first"), with_domain("second")
    await local.put_app(first, None)
    await local.put_app(first, first)
    await local.put_app(replace(second, customDomainVerified=False), None)
    with pytest.raises(NameTaken, match="Another app has verified"):
        await local.put_app(second, replace(second, customDomainVerified=False))
    assert {app.name for app in await local.list_apps("acc_one")} == {"first", "second"}, "both apps stay"
    assert (await local.domains.is_owner(first), await local.domains.is_owner(second)) == (True, False)

    renamed = replace(first, name="renamed")
    await local.put_app(renamed, first)
    with pytest.raises(NameTaken, match="Another app has verified"):
        await local.put_app(second, None)
    await local.put_app(replace(renamed, customDomain="other.example.com"), renamed)
    await local.put_app(second, None)
    await local.delete_app(second)
    await local.put_app(with_domain("third"), None)


async def test_of_many_concurrent_claims_one_succeeds(redis_url: str) -> None:
    async with process(redis_url) as one, process(redis_url) as other:
        puts = [(one, other)[number % 2].put_app(with_domain(f"app-{number}"), None) for number in range(8)]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["App"] + ["NameTaken"] * 7


async def test_a_claim_without_its_record_lapses(local: Registry) -> None:
    """As when a process dies between the two writes, or the put fails because the name is taken."""
    await compare_and_set(local.store, domain_key("www.example.com"), f"dead {time.time():.0f}")
    with pytest.raises(NameTaken):
        await local.put_app(with_domain("shop"), None)
    await compare_and_set(local.store, domain_key("www.example.com"), f"dead {time.time() - CLAIM_SECONDS - 1:.0f}")
    await local.put_app(with_domain("shop"), None)
    with pytest.raises(NameTaken, match="name"):
        await local.put_app(replace(with_domain("shop", "new.example.com"), id="other"), None)
    assert await local.store.get(domain_key("new.example.com")) is None


async def test_a_claim_that_redis_lost_counts_as_the_apps(local: Registry) -> None:
    await local.put_app(with_domain("first"), None)
    await compare_and_set(local.store, domain_key("www.example.com"), "")
    assert await local.domains.is_owner(with_domain("first"))
    assert not await local.domains.is_owner(an_app())
