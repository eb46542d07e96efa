"""How many addresses of an account have a pod at the same time: `GATEWAY_APP_PODS`, by the account's plan.

A swap needs a second pod for a while, which does not count. When the quota is used up and the live address of an app
needs a pod, a preview of the account sleeps for it. A smaller plan ends no pod, but no other one starts.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from gateway.deploys.pod_log import DEPLOY_LABEL
from gateway.deploys.states import DeployError
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.objects import ADDRESS_LABEL, APP_LABEL
from workers.kubernetes.pod import PodRelease

Address = tuple[str, str]  # the id of an app, and which of its addresses


class PodQuotaReached(DeployError):
    """The account has as many pods as its plan allows."""

    def __init__(self, limit: int) -> None:
        addresses = "one address" if limit == 1 else f"{limit} addresses"
        super().__init__(
            f"the account's apps and previews already run at {addresses}, as many as its plan allows; delete an app "
            "that you do not need, wait until one sleeps, or choose a larger plan"
        )


class PodQuota:
    """`find_limit` returns how many addresses of an account may have a pod."""

    def __init__(self, cluster: Cluster, find_limit: Callable[[str], Awaitable[int]]) -> None:
        self._cluster, self._find_limit = cluster, find_limit
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by account

    @asynccontextmanager
    async def reserve(
        self, release: PodRelease, let_sleep: Callable[[Address], Awaitable[bool]]
    ) -> AsyncIterator[None]:
        """Lets nobody else use the account's quota while a pod of the release is made. Raises DeployError.

        `let_sleep` ends the pods of a preview, and returns False for one that is needed.
        """
        async with self._locks.setdefault(release.account, asyncio.Lock()):
            running = self._list_running(release.account)
            if (release.app, release.address) not in running:
                limit = await self._find_limit(release.account)
                surplus = len(running) + 1 - limit
                previews = [address for address in running if address[1] != "live"]
                for address in previews if release.address == "live" else []:
                    if surplus > 0 and await let_sleep(address):
                        surplus -= 1
                if surplus > 0:
                    raise PodQuotaReached(limit)
            yield

    def _list_running(self, account: str) -> list[Address]:
        """Returns the addresses with pods, beginning with the oldest release."""
        releases = [
            each.metadata.labels
            for each in self._cluster.select("Deployment", account=account)
            if {DEPLOY_LABEL, APP_LABEL, ADDRESS_LABEL} <= each.metadata.labels.keys() and each.spec.replicas
        ]
        releases.sort(key=lambda labels: str(labels[DEPLOY_LABEL]))
        return list(dict.fromkeys((labels[APP_LABEL], labels[ADDRESS_LABEL]) for labels in releases))
