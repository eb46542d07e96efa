"""The previews of an account: how many it may have, which one makes room for the next, and how one ends.

The account has a sorted set of its previews, by the time of the last visit; a deploy that goes live counts as one. What
serves the apps notes the visits from time to time, so no request writes to Redis.
"""

from collections.abc import Mapping

from gateway.deploys.records import FINAL, PREVIEW_FIELD
from gateway.deploys.serving import Records
from gateway.keys import deploy_key, previews_key, site_key
from gateway.redis.client import Store


class Previews:
    """Every method raises BackboneUnavailable, and can be repeated."""

    def __init__(self, store: Store, serving: Records) -> None:
        self._store, self._serving = store, serving

    async def note_visits(self, visits: Mapping[tuple[str, str, str], float]) -> None:
        """Notes the Unix times of visits, by account, app and address. One that has ended meanwhile does not return."""
        if visits:
            async with self._store.client.pipeline(transaction=False) as pipe:
                for (account, app_id, name), at in visits.items():
                    pipe.zadd(previews_key(account), {f"{app_id} {name}": at}, xx=True, gt=True)
                await pipe.execute()

    async def make_room(self, account: str, limit: int) -> None:
        """Ends the previews beyond the limit that were not visited for longest.

        One that is being deployed stays: it is about to count as visited, and its builder waits for an answer.
        """
        for member in await self._store.client.zrange(previews_key(account), 0, -limit - 1):
            app_id, name = member.split(" ")
            if not await self._is_being_deployed(account, app_id, name):
                await self.end(account, app_id, name)

    async def _is_being_deployed(self, account: str, app_id: str, name: str) -> bool:
        _, known = (await self._serving.read(account, app_id)).get(name, ("", None))
        if known is None:
            return False
        state = await self._store.client.hget(deploy_key(account, known.deploy), "state")
        return state not in (None, *FINAL)

    async def end(self, account: str, app_id: str, name: str) -> bool:
        """Ends the preview at an address. Returns False if there is none."""
        was_served = await self._serving.end(account, app_id, name)
        async with self._store.client.pipeline(transaction=False) as pipe:
            pipe.hdel(site_key(account, app_id), PREVIEW_FIELD + name)
            pipe.zrem(previews_key(account), f"{app_id} {name}")
            was_live, _ = await pipe.execute()
        return was_served or bool(was_live)
