"""Claims to verified custom domains, so that of two apps with the same domain, one is served there.

`domain:<name>` holds the id of the app that has the claim, and the time of the claim. A put writes the claim before the
app's record, so a claim that its app's record does not confirm is ignored after `CLAIM_SECONDS`.
"""

import time
from collections.abc import Awaitable, Callable, Iterable

from gateway.accounts.records import App
from gateway.errors import NameTaken
from gateway.keys import domain_key
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record
from gateway.redis.scripts import compare_and_set

CLAIM_SECONDS = 60.0
DOMAIN_TAKEN = (
    "Another app has verified this domain. Remove it there first, or remove that app's TXT record: "
    "the domain is free again after 7 days."
)


class DomainClaims:
    def __init__(self, store: Store, find_app: Callable[[str], Awaitable[App | None]]) -> None:
        """`find_app` returns the app with an id."""
        self._store, self._find_app = store, find_app

    async def claim(self, app: App, domain: str) -> None:
        """Claims a domain for the app, whose record says next that it is verified.

        Raises NameTaken if another app has the domain.
        """

        async def compute(present: str) -> Change[None]:
            owner_id, _, since = present.partition(" ")
            if owner_id not in ("", app.id):
                confirmed = await self._confirm(owner_id, domain)
                if confirmed is not None or time.time() - float(since) < CLAIM_SECONDS:
                    raise NameTaken(DOMAIN_TAKEN)
            return Change(f"{app.id} {time.time():.0f}", None)

        await change_record(self._store, domain_key(domain), compute, subject="the claim to this domain")

    async def release(self, app: App, domains: Iterable[str]) -> None:
        """Removes the app's claims to these domains."""
        for domain in domains:
            present = await self._store.get(domain_key(domain)) or ""
            if present.partition(" ")[0] == app.id:
                await compare_and_set(self._store, domain_key(domain), "", expected=present)

    async def find_owner(self, domain: str) -> App | None:
        """Returns the app that is served at the domain. Ignores a claim that its app's record does not confirm."""
        claim = await self._store.get(domain_key(domain)) or ""
        return await self._confirm(claim.partition(" ")[0], domain)

    async def _confirm(self, owner_id: str, domain: str) -> App | None:
        owner = await self._find_app(owner_id)
        return owner if owner is not None and owner.id == owner_id and domain in owner.verified_domains else None

    async def list_lost(self, apps: Iterable[App]) -> set[tuple[str, str]]:
        """Returns the domains that the apps have verified and others are served at, with the apps' ids.

        A claim that Redis lost counts as the app's.
        """
        verified = [(app.id, domain) for app in apps for domain in app.verified_domains]
        claims = await self._store.get_all([domain_key(domain) for _, domain in verified])
        owners = [(claim or "").partition(" ")[0] for claim in claims]
        return {each for each, owner in zip(verified, owners, strict=True) if owner not in ("", each[0])}
