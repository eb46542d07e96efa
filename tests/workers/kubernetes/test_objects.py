"""The objects of an app in the cluster: valid for old and new versions, under Pod Security, and without secrets."""

import ipaddress
import re
from typing import Any

import kubernetes_validate
import msgspec
import pytest

from gateway.deploys.release import ReleaseArchive
from gateway.settings import Settings
from workers.kubernetes.objects import (
    Object,
    describe_claim,
    describe_data_deployment,
    describe_deployment,
    describe_endpoints,
    describe_ingress,
    describe_policy,
    describe_redirects,
    describe_secret,
    describe_service,
)
from workers.kubernetes.pod import PodRelease

SETTINGS = Settings(apps_engine="kubernetes", kubernetes_ingress_class="caddy", kubernetes_runtime_class="gvisor")
RELEASE = PodRelease(
    "acc_019b3c5a7d40123456789",
    "app-019b3c5a7d4abcdef0123",
    "p-a-branch-of-nineteen",
    "dep_019b3c5a7d4abcdef4567",
    ReleaseArchive("d" * 64, 1_000),
    "https://notes--p-a.example.com",
    runs=True,
)
SECRETS = ("the-token-of-this-release", "postgres://secret")


LIVE = msgspec.structs.replace(RELEASE, address="live")


def describe_all() -> list[Object]:
    return [
        describe_secret(RELEASE, SECRETS[0], {"DATABASE_URL": SECRETS[1]}),
        describe_deployment(RELEASE, SETTINGS),
        describe_deployment(LIVE, SETTINGS, asleep=True),
        *describe_claim(LIVE, 100 << 20, SECRETS[0], SETTINGS),
        describe_data_deployment(LIVE, SETTINGS),
        describe_endpoints(LIVE, "10.0.0.1", 8000),
        describe_service(RELEASE),
        describe_ingress(RELEASE, ["notes--p-a.example.com", "notes.example.org"], SETTINGS),
        describe_redirects(LIVE, {"www.example.org": "https://example.org"}),
        describe_policy(SETTINGS, "capsule"),
    ]


@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_the_objects_are_valid(version: str) -> None:
    for each in describe_all():
        kubernetes_validate.validate(each, version, strict=True)
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", each["metadata"]["name"]), each["metadata"]["name"]


@pytest.mark.parametrize(
    "deployment",
    [
        describe_deployment(RELEASE, SETTINGS),
        describe_deployment(LIVE, SETTINGS),
        describe_data_deployment(LIVE, SETTINGS),
    ],
)
def test_a_pod_satisfies_the_level_restricted(deployment: Object) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"] | {"runAsNonRoot": True} == pod["securityContext"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert {kind for volume in pod["volumes"] for kind in volume} <= {
        *("name", "emptyDir", "secret", "persistentVolumeClaim")
    }
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    for container in containers:
        context = container["securityContext"]
        assert not context["allowPrivilegeEscalation"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "hostPort" not in str(container)
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
    users = {each["name"]: each["securityContext"].get("runAsUser") for each in containers}
    assert all(users[name] is None for name in users.keys() & {"release", "web"})
    own = {users[name] for name in users.keys() & {"app", "data"}}
    assert own == {pod["securityContext"]["runAsUser"] + 1}, "the start command must not be the user of Caddy"


def test_the_longest_names_fit() -> None:
    longest = msgspec.structs.replace(LIVE, app="a" * 63)
    names = [describe_claim(longest, 1, "", SETTINGS)[0]["metadata"]["name"]]
    names += [describe_service(longest)["metadata"]["name"]]
    names += [describe_service(msgspec.structs.replace(longest, address="p-b"))["metadata"]["name"]]
    assert len(set(names)) == 3
    assert max(map(len, names)) <= 63


def test_secrets_are_in_the_secret_alone() -> None:
    secret, *others = describe_all()
    assert all(text not in str(each) for each in others for text in SECRETS)
    pod: dict[str, Any] = others[0]["spec"]["template"]["spec"]
    mounts = {each["name"]: {mount["name"] for mount in each["volumeMounts"]} for each in pod["containers"]}
    assert "token" not in mounts["web"] | mounts["app"]
    assert "variables" not in mounts["web"]
    assert secret["type"] == "Opaque"


@pytest.mark.parametrize(
    ("address", "reachable"),
    [
        *[(each, False) for each in ("10.96.0.1", "169.254.169.254", "fd00::1", "::ffff:10.0.0.1")],
        *[(each, True) for each in ("1.1.1.1", "2606:4700::1111")],
    ],
)
def test_only_public_addresses_are_reachable(address: str, reachable: bool) -> None:
    rules = describe_policy(SETTINGS, "")["spec"]["egress"]
    blocks = [each["ipBlock"] for rule in rules for each in rule["to"] if rule["ports"][0]["port"] != 53]
    inside = ipaddress.ip_address(address)
    found = any(
        inside in ipaddress.ip_network(block["cidr"])
        and not any(inside in ipaddress.ip_network(part) for part in block["except"])
        for block in blocks
    )
    assert found is reachable


@pytest.mark.parametrize(
    ("port", "namespace", "reaches"),
    [(61080, "ingress", True), (61080, "capsule", True), (61080, "default", False)]
    + [(port, namespace, namespace == "capsule") for port in (61081, 61082) for namespace in ("ingress", "capsule")],
)
def test_only_the_ingress_and_the_service_reach_apps(port: int, namespace: str, reaches: bool) -> None:
    settings = msgspec.structs.replace(SETTINGS, kubernetes_ingress_namespace="ingress")
    rules = describe_policy(settings, "capsule")["spec"]["ingress"]
    allowed = [
        each["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for rule in rules
        if port in [each["port"] for each in rule["ports"]]
        for each in rule["from"]
    ]
    assert (namespace in allowed) is reaches


def test_what_the_policy_allows_and_excludes_beside() -> None:
    """The cluster's resolver alone, and no network of the operator's own."""
    settings = msgspec.structs.replace(SETTINGS, kubernetes_exclude=("51.15.0.0/16", "2001:bc8::/32"))
    egress = describe_policy(settings, "")["spec"]["egress"]
    [names] = [rule for rule in egress if rule["ports"][0]["port"] == 53]
    cluster, local = names["to"]
    assert cluster["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}
    assert local == {"ipBlock": {"cidr": "169.254.20.10/32"}}
    blocks = [each["ipBlock"] for rule in egress for each in rule["to"] if "ipBlock" in each]
    excluded = {each["cidr"]: each.get("except", []) for each in blocks}
    assert "51.15.0.0/16" in excluded["0.0.0.0/0"]
    assert "2001:bc8::/32" in excluded["2000::/3"]


def test_cert_manager_issues_a_certificate_for_each_host_name() -> None:
    annotations = {"nginx.ingress.kubernetes.io/proxy-body-size": "0"}
    settings = msgspec.structs.replace(
        SETTINGS, kubernetes_tls_issuer="letsencrypt", kubernetes_ingress_annotations=annotations
    )
    ingress = describe_ingress(RELEASE, ["notes.example.com", "notes.example.org"], settings)
    assert ingress["metadata"]["annotations"] == annotations | {"cert-manager.io/cluster-issuer": "letsencrypt"}
    assert [(each["hosts"], each["secretName"]) for each in ingress["spec"]["tls"]] == [
        (["notes.example.com"], "tls-notes.example.com"),
        (["notes.example.org"], "tls-notes.example.org"),
    ]


def test_the_pods_of_an_app_have_its_redirects() -> None:
    """They are mounted where Caddy looks for them. A preview has no domain of its own."""
    secret = describe_redirects(LIVE, {"www.example.org": "https://example.org"})
    pod = describe_deployment(LIVE, SETTINGS)["spec"]["template"]["spec"]
    assert {"secretName": secret["metadata"]["name"], "optional": True} in [
        each.get("secret") for each in pod["volumes"]
    ]
    mounted = {each["name"]: [mount["mountPath"] for mount in each["volumeMounts"]] for each in pod["containers"]}
    assert [name for name, paths in mounted.items() if "/capsule/redirects" in paths] == ["web"]
    assert "redirects" not in str(describe_deployment(RELEASE, SETTINGS))


def test_quantities_are_as_the_api_writes_them() -> None:
    """Otherwise what is present would never be what is wanted, and would be applied again for ever."""
    claims = [describe_claim(LIVE, size << 20, "", SETTINGS)[0] for size in (100, 512, 1_024)]
    assert [each["spec"]["resources"]["requests"]["storage"] for each in claims] == ["200Mi", "1Gi", "2Gi"]
    quantities = re.findall(r"'(\d+)(m|Mi|Gi)'", str(describe_deployment(RELEASE, SETTINGS)))
    assert len(quantities) > 10
    assert not [(number, unit) for number, unit in quantities if int(number) % (1_000 if unit == "m" else 1_024) == 0]
