"""Where visitors get releases in the cluster: the Service of each address, and the Ingress with its host names.

Pods redirect visitors from one host name to another as the address's Secret says, which is mounted into them.

A Service leads to the pods of a release, or to the worker's activator (`activator.py`). Whoever follows it reads its
Endpoints or its EndpointSlices, so both say the same.
"""

from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from gateway.cancellation import RunningTasks
from gateway.deploys.addresses import url_of
from gateway.deploys.pod_log import DEPLOY_LABEL
from gateway.deploys.release import ReleaseArchive
from gateway.deploys.serving import Wanted
from gateway.deploys.states import DeployError
from gateway.settings import Settings
from workers.engine.driver import Hosts, Place
from workers.kubernetes.cluster import SERVICE_LABEL, SLICE, Cluster, Key
from workers.kubernetes.objects import (
    ACCOUNT_LABEL,
    ADDRESS_LABEL,
    APP_LABEL,
    address_name,
    describe_endpoints,
    describe_ingress,
    describe_redirects,
    describe_service,
    read_redirects,
)
from workers.kubernetes.pod import PodRelease

# The controllers that make EndpointSlices, as their label names them.
CONTROLLER_LABEL = "endpointslice.kubernetes.io/managed-by"
MIRROR_SECONDS = 5.0  # for the controller that copies Endpoints
SERVED = ("Service", "Deployment")  # one of these kinds shows that something of an app is there
FROM_PODS, FROM_ENDPOINTS = "endpointslice-controller.k8s.io", "endpointslicemirroring-controller.k8s.io"


class ClusterPlaces:
    """Implements `Places`. `activator` is the address and the port of this worker's activator."""

    def __init__(self, settings: Settings, cluster: Cluster, activator: tuple[str, int]) -> None:
        self._settings, self._cluster, self._activator = settings, cluster, activator
        self._sweeping = RunningTasks()
        cluster.followers[SLICE].append(self._note_slice)

    async def aclose(self) -> None:
        await self._sweeping.cancel()

    # -- Services --------------------------------------------------------------------------------------------

    def routed(self, wanted: Wanted | PodRelease | Place) -> str:
        """Returns the deploy whose release visitors get; '' for none."""
        service = self._read_service((wanted.app, wanted.address))
        return service["metadata"].get("labels", {}).get(DEPLOY_LABEL, "") if service is not None else ""

    def is_asleep(self, app_id: str, address: str) -> bool:
        """Returns whether the address leads to the activator."""
        service = self._read_service((app_id, address))
        return service is not None and not service["spec"].get("selector")

    def _read_service(self, address: tuple[str, str]) -> Any | None:
        """Returns the Service of an address as it shall be, or as it is after a restart of this worker."""
        key = ("Service", address_name(*address))
        if key in self._cluster.wanted:
            return self._cluster.wanted[key]
        present = self._cluster.present.get(key)
        return present.to_dict() if present is not None else None

    async def lead(self, release: PodRelease, *, asleep: bool) -> None:
        """Leads an address to a release, or to the activator. Raises DeployError."""
        activator = describe_endpoints(release, *self._activator)
        name = activator["metadata"]["name"]
        if not asleep:  # the cluster lists the pods there
            self._cluster.leave(("Endpoints", name))
        await self._cluster.apply(describe_service(release, asleep=asleep), *([activator] if asleep else []))
        if asleep:  # whoever calls this ends the pods next; the activator leads there too
            await self._cluster.until(partial(self._leads, name), MIRROR_SECONDS)
        await self._cluster.delete(*self._list_strays(name))

    def _leads(self, service: str) -> bool:
        """Returns whether the controller that a Service needs now has made an EndpointSlice that leads somewhere."""
        right, _ = self._sort_slices(service)
        endpoints = [endpoint for each in right for endpoint in each.endpoints or []]
        return any((each.get("conditions") or {}).get("ready") is not False for each in endpoints)

    def _list_strays(self, service: str) -> list[Key]:
        """Returns the EndpointSlices that lead elsewhere than their Service now.

        A controller that makes slices of pods leaves them when the Service has no selector any more, and the one that
        makes them of Endpoints leaves its own when there is a selector. They stay until another one leads there:
        without any, visitors would get an error.
        """
        _, strays = self._sort_slices(service)
        return [(SLICE, each.metadata.name) for each in strays] if self._leads(service) else []

    def _sort_slices(self, service: str) -> tuple[list[Any], list[Any]]:
        """Returns the slices of a Service by the controller that it needs now, and those by the other one."""
        described = self._cluster.wanted.get(("Service", service))
        if described is None:
            return [], []
        needed, other = (FROM_PODS, FROM_ENDPOINTS) if described["spec"]["selector"] else (FROM_ENDPOINTS, FROM_PODS)
        by_controller = defaultdict[str | None, list[Any]](list)
        for each in self._cluster.select(SLICE, service=service):
            by_controller[each.metadata.labels.get(CONTROLLER_LABEL)].append(each)
        return by_controller[needed], by_controller[other]

    def _note_slice(self, found: Any) -> None:
        """Deletes the slices that a controller has made too late, or that another one takes the place of."""
        if strays := self._list_strays(found.metadata.labels[SERVICE_LABEL]):
            self._sweeping.start(self._sweep(strays))

    async def _sweep(self, strays: Collection[Key]) -> None:
        with suppress(DeployError):  # which is logged where it is refused
            await self._cluster.delete(*strays)

    # -- host names ------------------------------------------------------------------------------------------

    async def name(self, release: PodRelease, hosts: Hosts) -> None:
        """Lets these host names lead to the address, and no others. Raises DeployError."""
        redirects = describe_redirects(release, {name: url_of(to, self._settings) for name, to in hosts.items() if to})
        ingress, served = describe_ingress(release, hosts, self._settings), self.routed(release)
        for described, needed in ((redirects, served and redirects["data"]), (ingress, served and hosts)):
            if needed:
                await self._cluster.apply(described)
            else:
                await self._cluster.delete((described["kind"], described["metadata"]["name"]))

    async def list_apps(self) -> set[str]:
        found = [each.metadata.labels for kind in SERVED for each in self._cluster.select(kind)]
        return {labels.get(APP_LABEL, "") for labels in found if ADDRESS_LABEL in labels}

    async def list_places(self, *app_ids: str) -> list[Place]:
        found = [each for app in app_ids for kind in SERVED for each in self._cluster.select(kind, app=app)]
        places = {_place_of(each) for each in found if ADDRESS_LABEL in each.metadata.labels}
        return [Place(*place, self._read_hosts(address_name(*place[1:]))) for place in places]

    def _read_hosts(self, name: str) -> Hosts:
        ingress, secret = (self._cluster.present.get((kind, name)) for kind in ("Ingress", "Secret"))
        urls = {} if secret is None else read_redirects(secret)
        hosts = [] if ingress is None else [rule.host for rule in ingress.spec.rules or []]
        return {host: urlsplit(urls.get(host, "")).hostname or "" for host in hosts}

    def places_at(self, host: str) -> list[Place]:
        return [Place(*_place_of(ingress)) for ingress in self._cluster.select("Ingress", host=host)]

    async def rename(self, place: Place, hosts: Hosts) -> None:
        await self.name(PodRelease(place.account, place.app, place.address, "", ReleaseArchive("", 0), ""), hosts)

    async def leave(self, place: Place) -> None:
        labels = {"app": place.app, "account": place.account, "address": place.address}
        kinds = ("Ingress", "Service", "Deployment", "Secret")
        # What belongs to no address belongs to the data, which the agent keeps as a snapshot first.
        selected = [(kind, each.metadata.name) for kind in kinds for each in self._cluster.select(kind, **labels)]
        await self._cluster.delete(*selected)


def _place_of(found: Any) -> tuple[str, str, str]:
    labels = found.metadata.labels
    return labels.get(ACCOUNT_LABEL, ""), labels.get(APP_LABEL, ""), labels.get(ADDRESS_LABEL, "")
