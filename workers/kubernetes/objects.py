"""The objects in the cluster, as they shall be: each function returns the whole object, as the API's JSON.

All have the label `app.kubernetes.io/managed-by: capsule`. Those of an app have its id, account and address too.

| object | for each | name |
| --- | --- | --- |
| Deployment, Secret | release that is served or checked | the deploy's id |
| Service, Ingress, Endpoints while it sleeps, Secret if it redirects | address of an app | its id and the address |
| PersistentVolumeClaim, Secret | app with data | the app's id and a digest of its account's |
| Deployment | app whose data are needed while it does not run | as the claim |
| NetworkPolicy | namespace | `capsule-apps` |
"""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from typing import Any

import msgspec

from gateway.deploys.pod_log import APP_CONTAINER, DEPLOY_LABEL
from gateway.outbound.public import GLOBAL_V6, NOT_PUBLIC
from gateway.settings import Settings
from workers.engine.app_data import AppData
from workers.hosting.watchdog import LIMITS, PORTS
from workers.kubernetes.pod import DATA_PORT, FOLDER, RECEIVE_PORT, SECRETS, TOKEN, VARIABLES, WEB_PORT, PodRelease
from workers.sandbox.bwrap import DATA_FILES
from workers.sandbox.keeper import DRAIN_SECONDS, STOP_SOON_DRAIN_SECONDS
from workers.sandbox.sandbox import APP, DATA, HOME, MIB, TMP

Object = dict[str, Any]

MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "capsule"
LABELS = "capsule/"  # with which the names of the service's own labels begin
APP_LABEL, ACCOUNT_LABEL, ADDRESS_LABEL = "capsule/app", "capsule/account", "capsule/address"
GONE_LABEL = "capsule/gone"
DATA_LABEL, DATA_CONTAINER = "capsule/data", "data"
POLICY_NAME = "capsule-apps"
FIRST_UID, UIDS = 1_000_000, 500_000  # pairs of user ids: Caddy has the first one, the start command the second
GIB = 1 << 30  # the API writes a quantity in the largest unit, and what it writes is compared with what is wanted
RELEASE_DISK = "4352Mi"  # for a release and its archive, and for files of the previous one
NAME_LENGTH = 63
COPIES = 2  # of the data have room in their volume: a restore keeps the files from before
# Before a container is stopped: waits until the ingress knows, and no visitor has an established connection (state 01).
DRAIN = f"""sleep 3
for _ in $(seq SECONDS); do
    grep -q ':{WEB_PORT:04X} [^ ]* 01 ' /proc/net/tcp /proc/net/tcp6 || break
    sleep 1
done"""
LOCAL_RESOLVER = "169.254.20.10/32"  # NodeLocal DNSCache, if it runs
# What a container usually uses, by its role: thousandths of a core, and MiB of memory and of disk. All of a pod use a
# fiftieth of a core, a quarter of the start command's limit, and 64 MiB of disk. One machine reserves no more either.
USUAL = {"run": (10, 64, 32), "web": (5, 32, 16), "data": (5, 32, 16)}
ALONE = (20, 64, 64)  # while no other container of the pod runs
NODE_SECONDS = 30  # after which the pods of a node that is gone start on another one


def object_name(identifier: str) -> str:
    """Returns an id as a name of the API, which has no underscores."""
    return identifier.replace("_", "-")


def address_name(app_id: str, address: str) -> str:
    return _fit(f"{object_name(app_id)}-{address}")


def claim_name(app_id: str, account: str) -> str:
    """Returns the name of the claim to the volume with an app's data. An id may later be another account's app."""
    return _fit(f"{object_name(app_id)}-{_digest(account)}")


def _fit(name: str) -> str:
    """Shortens a name to the length of a host name's label, which Services and labels may have."""
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 9]}-{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def find_uid(app_id: str) -> int:
    """Returns the user id of an app's Caddy. Its start command has the next one. Two apps may share them."""
    return FIRST_UID + 2 * (int(_digest(app_id), 16) % UIDS)


def describe_secret(release: PodRelease, token: str, variables: Mapping[str, str]) -> Object:
    values = {TOKEN: token, VARIABLES: msgspec.json.encode(variables).decode()}
    return _make_secret(object_name(release.deploy), _labels(release, release.deploy), values)


def _make_secret(name: str, labels: Mapping[str, str], values: Mapping[str, str]) -> Object:
    data = {key: b64encode(value.encode()).decode() for key, value in values.items()}
    return {**_head("v1", "Secret", name, labels), "type": "Opaque", "data": data}


def describe_redirects(release: PodRelease, urls: Mapping[str, str]) -> Object:
    """Describes the files that redirect host names of an address to URLs. Its pods follow changes in about a minute."""
    return _make_secret(address_name(release.app, release.address), _labels(release), urls)


def read_redirects(secret: Any) -> dict[str, str]:
    """Returns the URLs by host name."""
    return {host: b64decode(url).decode() for host, url in (secret.data or {}).items()}


def describe_claim(release: PodRelease, limit: int, token: str, settings: Settings) -> list[Object]:
    """Describes the volume for so many bytes of data, and the token of those who may change them."""
    name, labels = claim_name(release.app, release.account), _data_labels(release)
    spec: Object = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": _quantity(COPIES * limit)}},
    }
    if settings.kubernetes_storage_class:
        spec["storageClassName"] = settings.kubernetes_storage_class
    claim = {**_head("v1", "PersistentVolumeClaim", name, labels), "spec": spec}
    return [claim, _make_secret(name, labels, {TOKEN: token})]


def describe_gone(claim: Any, at: float) -> Object:
    """Describes a mark that an app with a volume was found to be gone at this time (Unix, seconds)."""
    since = f"{at:.0f}"
    return _make_secret(gone_name(claim.metadata.name), {**claim.metadata.labels, GONE_LABEL: since}, {"since": since})


def gone_name(claim: str) -> str:
    return f"{claim}-gone"


def describe_data_deployment(release: PodRelease, settings: Settings) -> Object:
    """Describes a pod that has the data of an app, while the app does not run."""
    name, labels = claim_name(release.app, release.account), _data_labels(release)
    pod = _make_pod(release, settings, [_data_container(release, settings)], _data_volumes(release))
    return _make_deployment(name, labels, {DATA_LABEL: name}, pod)


def describe_deployment(release: PodRelease, settings: Settings, *, asleep: bool = False) -> Object:
    """Describes one pod with up to four containers (`pod.py`), or none while the app sleeps."""
    labels = _labels(release, release.deploy)
    volumes: list[Object] = [
        {"name": "capsule", "emptyDir": {"sizeLimit": RELEASE_DISK}},
        {"name": "token", "secret": _secret_file(object_name(release.deploy), TOKEN)},
    ]
    files = _mount("capsule", FOLDER)
    receive = _container("release", "receive", release, settings, [files, _mount("token", SECRETS, read_only=True)])
    visited = [files]
    if release.address == "live":  # which alone has domains of its own
        name = address_name(release.app, release.address)
        volumes.append({"name": "redirects", "secret": {"secretName": name, "optional": True}})
        visited.append(_mount("redirects", FOLDER / "redirects", read_only=True))
    web = _container("web", "web", release, settings, visited) | {
        "ports": [{"name": "http", "containerPort": WEB_PORT, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": WEB_PORT}, "periodSeconds": 1, "timeoutSeconds": 2},
    }
    drained = [web]
    if release.runs:
        volumes += [_scratch("home"), _scratch("tmp")]
        volumes.append({"name": "variables", "secret": _secret_file(object_name(release.deploy), VARIABLES)})
        path = f"releases/{release.app}/{release.address}/{release.deploy}/app"
        places = {"releases": FOLDER / "releases", path: APP}
        mounts = [_mount("capsule", place, read_only=True) | {"subPath": part} for part, place in places.items()]
        mounts.append(_mount("variables", SECRETS, read_only=True))
        mounts += [_mount(name, place) for name, place in {"home": HOME, "tmp": TMP}.items()]
        if release.keeps_data:
            # The files alone can be written to. A container that starts again finds the present ones.
            mounts += [
                _mount("data", DATA) | {"subPath": DATA_FILES},
                _mount("data", _data_place(release), read_only=True),
            ]
        else:
            volumes.append(_scratch("data"))
            mounts.append(_mount("data", DATA))
        app = _container(APP_CONTAINER, "run", release, settings, mounts)
        app["securityContext"] |= {"runAsUser": find_uid(release.app) + 1}
        app["terminationMessagePolicy"] = "FallbackToLogsOnError"  # the last lines of a crash
        drained.append(app)
    drain = DRAIN.replace("SECONDS", f"{STOP_SOON_DRAIN_SECONDS if release.alone else DRAIN_SECONDS:.0f}")
    for container in drained:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", drain]}}}
    containers = [*drained]
    if release.keeps_data:
        labels |= {DATA_LABEL: claim_name(release.app, release.account)}
        volumes += _data_volumes(release)
        containers.append(_data_container(release, settings))
        receive["volumeMounts"].append(_mount("data", _data_place(release)))
    pod = _make_pod(release, settings, containers, volumes) | {"initContainers": [receive]}
    return _make_deployment(object_name(release.deploy), labels, {DEPLOY_LABEL: release.deploy}, pod, int(not asleep))


def _data_container(release: PodRelease, settings: Settings) -> Object:
    mounts = [
        _mount("data", _data_place(release)),
        _mount("data-token", SECRETS, read_only=True),
        _mount("data-scratch", TMP),
    ]
    container = _container(DATA_CONTAINER, "data", release, settings, mounts)
    container["securityContext"] |= {"runAsUser": find_uid(release.app) + 1}
    return container  # without a probe: visitors must get the app while this one is busy


def _data_volumes(release: PodRelease) -> list[Object]:
    name = claim_name(release.app, release.account)
    return [
        {"name": "data", "persistentVolumeClaim": {"claimName": name}},
        {"name": "data-token", "secret": _secret_file(name, TOKEN)},
        {"name": "data-scratch", "emptyDir": {}},
    ]


def _data_place(release: PodRelease) -> Path:
    return AppData(FOLDER, release.app).folder


def _make_pod(release: PodRelease, settings: Settings, containers: list[Object], volumes: list[Object]) -> Object:
    """Describes a pod that satisfies the Pod Security level `restricted`."""
    uid = find_uid(release.app)
    pod: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(DRAIN_SECONDS + LIMITS.grace) + 10,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": uid,
            "runAsGroup": uid,
            "fsGroup": uid,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [
            {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute"}
            | {"tolerationSeconds": NODE_SECONDS}
            for key in ("not-ready", "unreachable")
        ],
        "containers": containers,
        "volumes": volumes,
    }
    if release.keeps_data:  # only the pods of one node can share the volume
        selector = {"matchLabels": {DATA_LABEL: claim_name(release.app, release.account)}}
        near = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
        preferred = [{"weight": 100, "podAffinityTerm": near}]
        pod["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    if settings.kubernetes_runtime_class:
        pod["runtimeClassName"] = settings.kubernetes_runtime_class
    return pod


def _make_deployment(
    name: str, labels: Mapping[str, str], selector: Mapping[str, str], pod: Object, replicas: int = 1
) -> Object:
    return {
        **_head("apps/v1", "Deployment", name, labels),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 0,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": selector},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def describe_service(release: PodRelease, *, asleep: bool = False) -> Object:
    """Describes the Service of an address, which leads to the pod of this release: a swap changes its selector.

    While the app sleeps, it leads where the Endpoints do.
    """
    return {
        **_head("v1", "Service", address_name(release.app, release.address), _labels(release, release.deploy)),
        "spec": {
            "type": "ClusterIP",
            "selector": None if asleep else {DEPLOY_LABEL: release.deploy},
            "ports": [{"name": "http", "port": 80, "targetPort": WEB_PORT, "protocol": "TCP"}],
        },
    }


def describe_endpoints(release: PodRelease, address: str, port: int) -> Object:
    """Describes where the Service leads while the app sleeps."""
    ports = [{"name": "http", "port": port, "protocol": "TCP"}]
    labels = _labels(release, release.deploy)
    return {
        **_head("v1", "Endpoints", address_name(release.app, release.address), labels),
        "subsets": [{"addresses": [{"ip": address}], "ports": ports}],
    }


def describe_ingress(release: PodRelease, hosts: Collection[str], settings: Settings) -> Object:
    """Describes which host names lead to the Service of an address. cert-manager makes a certificate for each."""
    name, annotations = address_name(release.app, release.address), dict(settings.kubernetes_ingress_annotations)
    backend = {"service": {"name": name, "port": {"name": "http"}}}
    paths = {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}
    spec: Object = {"rules": [{"host": host, "http": paths} for host in hosts]}
    if settings.kubernetes_ingress_class:
        spec["ingressClassName"] = settings.kubernetes_ingress_class
    if settings.kubernetes_tls_issuer:
        annotations["cert-manager.io/cluster-issuer"] = settings.kubernetes_tls_issuer
        spec["tls"] = [{"hosts": [host], "secretName": f"tls-{host}"} for host in hosts]
    ingress = {**_head("networking.k8s.io/v1", "Ingress", name, _labels(release)), "spec": spec}
    if annotations:
        ingress["metadata"]["annotations"] = annotations
    return ingress


def describe_policy(settings: Settings, own_namespace: str) -> Object:
    """Describes what apps may be asked, and what they may reach: names, and public addresses at the usual ports.

    `own_namespace`: of the service's pods, which reach all ports of the apps'; '' outside of the cluster, where they
    have no namespace.
    """
    excluded = [*NOT_PUBLIC, *map(ip_network, settings.kubernetes_exclude)]
    public = [
        {"ipBlock": {"cidr": str(block), "except": [str(each) for each in excluded if each.version == block.version]}}
        for block in (IPv4Network("0.0.0.0/0"), GLOBAL_V6)
    ]
    service = [_namespace(own_namespace)] if own_namespace else []
    visitors = (
        [*service, _namespace(settings.kubernetes_ingress_namespace)] if settings.kubernetes_ingress_namespace else []
    )
    resolver = [
        _namespace("kube-system") | {"podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}},
        {"ipBlock": {"cidr": LOCAL_RESOLVER}},
    ]
    return {
        **_head("networking.k8s.io/v1", "NetworkPolicy", POLICY_NAME, {MANAGED_BY: MANAGER}),
        "spec": {
            "podSelector": {"matchLabels": {MANAGED_BY: MANAGER}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                _from(visitors) | {"ports": [{"protocol": "TCP", "port": WEB_PORT}]},
                _from(service) | {"ports": [{"protocol": "TCP", "port": port} for port in (RECEIVE_PORT, DATA_PORT)]},
            ],
            "egress": [
                {"to": resolver, "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]},
                {"to": public, "ports": [{"protocol": "TCP", "port": port} for port in PORTS]},
            ],
        },
    }


def _namespace(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _from(peers: list[Object]) -> Object:
    """Names who may connect; nobody in particular stands for everybody."""
    return {"from": peers} if peers else {}


def _head(version: str, kind: str, name: str, labels: Mapping[str, str]) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": dict(labels)}}


def _labels(release: PodRelease, deploy: str = "") -> dict[str, str]:
    found = {ACCOUNT_LABEL: release.account, APP_LABEL: release.app, ADDRESS_LABEL: release.address}
    return {MANAGED_BY: MANAGER, **found, **({DEPLOY_LABEL: deploy} if deploy else {})}


def _data_labels(release: PodRelease) -> dict[str, str]:
    own = {ACCOUNT_LABEL: release.account, APP_LABEL: release.app}
    return {MANAGED_BY: MANAGER, **own, DATA_LABEL: claim_name(release.app, release.account)}


def _secret_file(secret: str, name: str) -> Object:
    return {"secretName": secret, "items": [{"key": name, "path": name}]}


def _scratch(name: str) -> Object:
    return {"name": name, "emptyDir": {"sizeLimit": f"{LIMITS.disk // GIB}Gi"}}


def _quantity(size: int) -> str:
    """Writes a number of bytes, in whole MiB, as the API does."""
    mebibytes = -(-size // MIB)
    return f"{mebibytes // 1024}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"


def _mount(name: str, place: object, *, read_only: bool = False) -> Object:
    return {"name": name, "mountPath": str(place), **({"readOnly": True} if read_only else {})}


def _container(name: str, role: str, release: PodRelease, settings: Settings, mounts: list[Object]) -> Object:
    limit = LIMITS.memory // MIB if role == "run" else 256
    is_alone = role == "receive" or not release.runs
    cpu, memory, disk = ALONE if is_alone else USUAL[role]
    return {
        "name": name,
        "image": settings.kubernetes_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "capsule_gateway.pod", role],
        "workingDir": "/",  # the image's belongs to another user
        "env": [{"name": "CAPSULE_POD", "value": msgspec.json.encode(release).decode()}],
        "resources": {
            "limits": {"cpu": str(LIMITS.cpus), "memory": f"{limit}Mi", "ephemeral-storage": "5Gi"},
            "requests": {"cpu": f"{cpu}m", "memory": f"{memory}Mi", "ephemeral-storage": f"{disk}Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": mounts,
    }
