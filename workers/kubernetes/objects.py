"""The objects in the cluster, as they shall be: each function returns the whole object, as the API's JSON.

All have the label `app.kubernetes.io/managed-by: capsule`. Those of an app have its id, account and address too.

| object | for each | name |
| --- | --- | --- |
| Deployment, Secret | release that is served or checked | the deploy's id |
| Service, Ingress | address of an app | the app's id and the address |
| NetworkPolicy | namespace | `capsule-apps` |
"""

import hashlib
from base64 import b64encode
from collections.abc import Collection, Mapping
from ipaddress import IPv4Network
from typing import Any

import msgspec

from gateway.deploys.pod_log import APP_CONTAINER, DEPLOY_LABEL
from gateway.outbound.public import GLOBAL_V6, NOT_PUBLIC
from gateway.settings import Settings
from workers.hosting.watchdog import LIMITS, PORTS
from workers.kubernetes.pod import FOLDER, RECEIVE_PORT, SECRETS, TOKEN, VARIABLES, WEB_PORT, PodRelease
from workers.sandbox.keeper import DRAIN_SECONDS
from workers.sandbox.sandbox import APP, DATA, HOME, MIB, TMP

Object = dict[str, Any]

MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "capsule"
APP_LABEL, ACCOUNT_LABEL, ADDRESS_LABEL = "capsule/app", "capsule/account", "capsule/address"
POLICY_NAME = "capsule-apps"
FIRST_UID, UIDS = 1_000_000, 500_000  # pairs of user ids: Caddy has the first one, the start command the second
GIB = 1 << 30  # the API writes a quantity in the largest unit, and what it writes is compared with what is wanted
RELEASE_DISK = "4Gi"  # for a release and its archive
# Before a container is stopped: waits until the ingress knows, and no visitor has an established connection (state 01).
DRAIN = f"""sleep 3
for _ in $(seq {DRAIN_SECONDS:.0f}); do
    grep -q ':{WEB_PORT:04X} [^ ]* 01 ' /proc/net/tcp /proc/net/tcp6 || break
    sleep 1
done"""
NODE_SECONDS = 30  # after which the pods of a node that is gone start on another one


def object_name(identifier: str) -> str:
    """Returns an id as a name of the API, which has no underscores."""
    return identifier.replace("_", "-")


def address_name(app_id: str, address: str) -> str:
    return f"{object_name(app_id)}-{address}"


def find_uid(app_id: str) -> int:
    """Returns the user id of an app's Caddy. Its start command has the next one. Two apps may share them."""
    return FIRST_UID + 2 * (int(hashlib.sha256(app_id.encode()).hexdigest()[:8], 16) % UIDS)


def describe_secret(release: PodRelease, token: str, variables: Mapping[str, str]) -> Object:
    values = {TOKEN: token, VARIABLES: msgspec.json.encode(variables).decode()}
    return {
        **_head("v1", "Secret", object_name(release.deploy), _labels(release, release.deploy)),
        "type": "Opaque",
        "data": {name: b64encode(value.encode()).decode() for name, value in values.items()},
    }


def describe_deployment(release: PodRelease, settings: Settings) -> Object:
    """Describes one pod with up to three containers (`pod.py`). It satisfies the Pod Security level `restricted`."""
    uid, labels = find_uid(release.app), _labels(release, release.deploy)
    volumes: list[Object] = [
        {"name": "capsule", "emptyDir": {"sizeLimit": RELEASE_DISK}},
        {"name": "token", "secret": _secret_file(release, TOKEN)},
    ]
    files = _mount("capsule", FOLDER)
    receive = _container("release", "receive", release, settings, [files, _mount("token", SECRETS, read_only=True)])
    web = _container("web", "web", release, settings, [files]) | {
        "ports": [{"name": "http", "containerPort": WEB_PORT, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": WEB_PORT}, "periodSeconds": 1, "timeoutSeconds": 2},
    }
    containers = [web]
    if release.runs and not release.suspended:
        scratch = dict.fromkeys(("home", "tmp", "data"), f"{LIMITS.disk // GIB}Gi")
        volumes += [{"name": name, "emptyDir": {"sizeLimit": size}} for name, size in scratch.items()]
        volumes.append({"name": "variables", "secret": _secret_file(release, VARIABLES)})
        path = f"releases/{release.app}/{release.address}/{release.deploy}/app"
        places = {"releases": FOLDER / "releases", path: APP}
        mounts = [_mount("capsule", place, read_only=True) | {"subPath": part} for part, place in places.items()]
        mounts.append(_mount("variables", SECRETS, read_only=True))
        mounts += [_mount(name, place) for name, place in {"home": HOME, "tmp": TMP, "data": DATA}.items()]
        app = _container(APP_CONTAINER, "run", release, settings, mounts)
        app["securityContext"] |= {"runAsUser": uid + 1}
        app["terminationMessagePolicy"] = "FallbackToLogsOnError"  # the last lines of a crash
        containers.append(app)
    for container in containers:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", DRAIN]}}}
    pod: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(DRAIN_SECONDS + LIMITS.grace) + 10,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": uid,
            "runAsGroup": uid,
            "fsGroup": uid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [
            {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute"}
            | {"tolerationSeconds": NODE_SECONDS}
            for key in ("not-ready", "unreachable")
        ],
        "initContainers": [receive],
        "containers": containers,
        "volumes": volumes,
    }
    if settings.kubernetes_runtime_class:
        pod["runtimeClassName"] = settings.kubernetes_runtime_class
    return {
        **_head("apps/v1", "Deployment", object_name(release.deploy), labels),
        "spec": {
            "replicas": 1,
            "revisionHistoryLimit": 0,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": {DEPLOY_LABEL: release.deploy}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def describe_service(release: PodRelease) -> Object:
    """Describes the Service of an address, which leads to the pod of this release: a swap changes its selector."""
    return {
        **_head("v1", "Service", address_name(release.app, release.address), _labels(release)),
        "spec": {
            "type": "ClusterIP",
            "selector": {DEPLOY_LABEL: release.deploy},
            "ports": [{"name": "http", "port": 80, "targetPort": WEB_PORT, "protocol": "TCP"}],
        },
    }


def describe_ingress(release: PodRelease, hosts: Collection[str], settings: Settings) -> Object:
    name = address_name(release.app, release.address)
    backend = {"service": {"name": name, "port": {"name": "http"}}}
    paths = {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}
    spec: Object = {"rules": [{"host": host, "http": paths} for host in hosts]}
    if settings.kubernetes_ingress_class:
        spec["ingressClassName"] = settings.kubernetes_ingress_class
    return {**_head("networking.k8s.io/v1", "Ingress", name, _labels(release)), "spec": spec}


def describe_policy() -> Object:
    """Describes what apps may be asked, and what they may reach: names, and public addresses at the usual ports."""
    every = (IPv4Network("0.0.0.0/0"), GLOBAL_V6)
    private = {block: [str(each) for each in NOT_PUBLIC if each.version == block.version] for block in every}
    public = [{"ipBlock": {"cidr": str(block), "except": parts}} for block, parts in private.items()]
    return {
        **_head("networking.k8s.io/v1", "NetworkPolicy", POLICY_NAME, {MANAGED_BY: MANAGER}),
        "spec": {
            "podSelector": {"matchLabels": {MANAGED_BY: MANAGER}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"protocol": "TCP", "port": port} for port in (WEB_PORT, RECEIVE_PORT)]}],
            "egress": [
                {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]},
                {"to": public, "ports": [{"protocol": "TCP", "port": port} for port in PORTS]},
            ],
        },
    }


def _head(version: str, kind: str, name: str, labels: Mapping[str, str]) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": dict(labels)}}


def _labels(release: PodRelease, deploy: str = "") -> dict[str, str]:
    found = {ACCOUNT_LABEL: release.account, APP_LABEL: release.app, ADDRESS_LABEL: release.address}
    return {MANAGED_BY: MANAGER, **found, **({DEPLOY_LABEL: deploy} if deploy else {})}


def _secret_file(release: PodRelease, name: str) -> Object:
    return {"secretName": object_name(release.deploy), "items": [{"key": name, "path": name}]}


def _mount(name: str, place: object, *, read_only: bool = False) -> Object:
    return {"name": name, "mountPath": str(place), **({"readOnly": True} if read_only else {})}


def _container(name: str, role: str, release: PodRelease, settings: Settings, mounts: list[Object]) -> Object:
    memory = LIMITS.memory // MIB if role == "run" else 256
    return {
        "name": name,
        "image": settings.kubernetes_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "capsule_gateway.pod", role],
        "workingDir": "/",  # the image's belongs to another user
        "env": [{"name": "CAPSULE_POD", "value": msgspec.json.encode(release).decode()}],
        # One machine does not reserve what apps may use either.
        "resources": {
            "limits": {"cpu": str(LIMITS.cpus), "memory": f"{memory}Mi", "ephemeral-storage": "5Gi"},
            "requests": {"cpu": "20m", "memory": f"{memory // 4}Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": mounts,
    }
