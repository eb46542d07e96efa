"""Claims to verified custom domains: of apps with the same domain, one is served there."""

import asyncio
import time

import pytest
from msgspec.structs import replace

from gateway.accounts.domain_claims import CLAIM_SECONDS
from gateway.accounts.records import App, Domain, replace_domains
from gateway.accounts.registry import Registry
from gateway.errors import NameTaken
from gateway.keys import domain_key
from gateway.redis.scripts import compare_and_set
from tests.support.registries import an_app, process

WWW = "www.example.com"


def with_domain(name: str, domain: str = WWW, *, verified: bool = True) -> App:
    return replace_domains(an_app(name), [Domain(domain, verified)])


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


async def test_an_app_claims_each_of_its_verified_domains(local: Registry) -> None:
    names = ["a.example.com", "b.example.com", "c.example.com"]
    a, b, c = [Domain(name, verified=True) for name in names]

    async def owners() -> list[str]:
        found = [await local.domains.find_owner(name) for name in names]
        return ["" if owner is None else owner.name for owner in found]

    first = await local.put_app(replace_domains(an_app("first"), [a, Domain(b.name), c]), None)
    assert await owners() == ["first", "", "first"]
    assert (await local.put_app(with_domain("second", b.name), None)).verified_domains == (b.name,)
    wanted = replace_domains(first, [a, b, c])
    with pytest.raises(NameTaken, match="Another app has verified"):
        await local.put_app(wanted, first)
    assert await owners() == ["first", "second", "first"], "a put that is refused changes nothing"
    assert await local.domains.list_lost([wanted]) == {(first.id, b.name)}
    # Another order keeps every claim, and a domain that is left out or no longer verified is free.
    first = await local.change_domains(first, lambda domains: [*reversed(domains)])
    assert (await owners(), first.customDomain) == (["first", "second", "first"], c.name)
    first = await local.change_domains(first, lambda _: [a, Domain(c.name)])
    assert await owners() == ["first", "second", ""]
    assert await local.store.get(domain_key(c.name)) is None
    await local.delete_app(first)
    assert await owners() == ["", "second", ""]
