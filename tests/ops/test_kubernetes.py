"""The manifests of ops/kubernetes are valid, agree with each other, and use only settings and commands that exist."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from capsule_gateway.cli.main import main
from gateway.outbound.public import GLOBAL_V6, NOT_PUBLIC
from gateway.server import supervisor
from gateway.server.serve import SHUTDOWN_SECONDS
from gateway.settings.prices import PRICES
from gateway.telemetry.metrics import Metrics
from tests.fakes import FakeProvider
from tests.support.fixtures import provider as provider
from tests.support.gateway_process import gateway
from tests.support.kustomize import Document, build, containers, identity
from tests.support.pages import find_table, read_page
from tests.support.redis_servers import RedisServer
from workers.sandbox.machine import NEEDED_CAPABILITIES
from workers.sandbox.sandbox import APP_USERS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ops/kubernetes"
README = (FOLDER / "README.md").read_text()
KUSTOMIZATIONS = sorted(path.parent for path in FOLDER.glob("*/kustomization.yaml"))
VERSION = "1.34"
SECRET = {"GATEWAY_REDIS_URL", "GATEWAY_ENCRYPTION_KEY", "GATEWAY_OPERATOR_TOKEN", "GATEWAY_PROVIDER_KEY"}
# Bits of Linux' capabilities.
BITS = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7, "SYS_PTRACE": 19}

# The versions of operators' resources, for which kubernetes_validate has no schema.
CUSTOM = {
    **dict.fromkeys(["ServiceMonitor", "PrometheusRule"], "monitoring.coreos.com/v1"),
    **dict.fromkeys(["GatewayClass", "Gateway", "HTTPRoute"], "gateway.networking.k8s.io/v1"),
    "EnvoyProxy": "gateway.envoyproxy.io/v1alpha1",
    "ScaledObject": "keda.sh/v1alpha1",
}
EXAMPLE = build(FOLDER / "example")
APPS = build(FOLDER / "apps")


def list_documents(kind: str) -> list[Document]:
    return [document for document in EXAMPLE if document["kind"] == kind]


def find_document(kind: str, namespace: str, name: str) -> Document:
    (found,) = [document for document in EXAMPLE if identity(document) == (kind, namespace, name)]
    return found


def list_pods(namespace: str) -> list[Document]:
    return [d["spec"]["template"] for d in list_documents("Deployment") if d["metadata"]["namespace"] == namespace]


def parametrize_deployments() -> list[Any]:
    return [pytest.param(d, id=d["metadata"]["name"]) for d in list_documents("Deployment")]


def find_probes(container: Document) -> dict[str, Document]:
    return {name: container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container}


def matches(selector: Document, labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items()


# -- valid ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_every_document_fits_its_schema(folder: Path) -> None:
    documents = build(folder)
    assert documents
    for document in documents:
        if document["kind"] in CUSTOM:
            assert document["apiVersion"] == CUSTOM[document["kind"]]
        else:
            kubernetes_validate.validate(document, VERSION, strict=True)


# -- agreement with the service ------------------------------------------------------------------------------


def test_every_variable_is_a_setting() -> None:
    names = {name for document in list_documents("ConfigMap") for name in document["data"]}
    names |= {v["name"] for d in list_documents("Deployment") for c in containers(d) for v in c.get("env", [])}
    assert names <= set(find_table(read_page("docs/settings.md"), "variable"))


@pytest.mark.parametrize("deployment", parametrize_deployments())
def test_every_command_exists(deployment: Document) -> None:
    for container in containers(deployment):
        commands = [
            container["command"],
            *(p["exec"]["command"] for p in find_probes(container).values() if "exec" in p),
        ]
        for command in commands:
            read_command(command)


def read_command(words: Sequence[str]) -> dict[str, Any]:
    """Returns the parameters of a `capsule` command. Raises if it does not exist, or refuses them."""
    program, name, *arguments = words
    assert program == "capsule"
    # The context needs a parent, as in `capsule`: a command keeps the help options of its first context.
    parent = click.Context(main, **main.context_settings)
    command = main.get_command(parent, name)
    assert command is not None
    return command.make_context(name, arguments, parent=parent).params


async def test_probes_without_redis(provider: FakeProvider, tmp_path: Path) -> None:
    """A pod without Redis takes no requests, but is not restarted, because its streams continue."""
    (container,) = containers(find_document("Deployment", "capsule", "gateway"))
    paths = {name: probe["httpGet"]["path"] for name, probe in find_probes(container).items()}
    with RedisServer() as server:
        async with gateway(server.url, provider, tmp_path) as gw:
            assert [await gw.answers(path) for path in paths.values()] == [True] * 3
            metrics = (
                await gw.http.get(find_document("ServiceMonitor", "capsule", "gateway")["spec"]["endpoints"][0]["path"])
            ).text
            (metric,) = [m["pods"]["metric"]["name"] for m in find_autoscaler()["metrics"] if m["type"] == "Pods"]
            assert f"# TYPE {metric} gauge" in metrics
            (rule,) = yaml.safe_load((FOLDER / "monitoring/adapter-rules.yaml").read_text())["rules"]["custom"]
            assert re.match(r"\w+", rule["seriesQuery"])[0] == metric  # type: ignore[index]
            server.stop()
            answers = {name: await gw.answers(path) for name, path in paths.items()}
            assert answers == {"startupProbe": True, "readinessProbe": False, "livenessProbe": True}


def test_the_daily_backup_is_a_command_that_exists() -> None:
    configuration, job = build(FOLDER / "backup")
    [container] = containers(job)
    target = configuration["data"]["TARGET"]
    parameters = read_command([word.replace("$(TARGET)", target) for word in container["command"]])
    assert (parameters["words"], parameters["keep"]) == (("s3://backups/capsule",), 30)
    assert container["image"] == "registry.example.com/capsule-gateway:0.1.0"
    assert {each["name"] for each in container["env"]} <= SECRET


def find_autoscaler() -> Document:
    spec: Document = find_document("HorizontalPodAutoscaler", "capsule", "gateway")["spec"]
    return spec


def test_the_drain_fits_into_the_grace_period() -> None:
    deployment = find_document("Deployment", "capsule", "gateway")
    (container,) = containers(deployment)
    assert container["lifecycle"]["preStop"]["exec"]["command"][0] == "sleep"
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(find_document("ConfigMap", "capsule", "capsule")["data"]["GATEWAY_DRAIN"])
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > before + drain + SHUTDOWN_SECONDS + supervisor.STOP_MARGIN_SECONDS
    assert before >= 2 * find_probes(container)["readinessProbe"]["periodSeconds"]


# -- permissions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deployment", parametrize_deployments())
def test_containers_are_bounded(deployment: Document) -> None:
    pod = deployment["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    for container in containers(deployment):
        assert set(container["resources"]["requests"]) >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        if deployment["metadata"]["namespace"] == "capsule":
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert "add" not in security["capabilities"]
        else:
            assert pod["hostUsers"] is False
            added = security["capabilities"]["add"]
            assert sum(1 << BITS[name] for name in added) & NEEDED_CAPABILITIES == NEEDED_CAPABILITIES
            assert f"cap_add: [{', '.join(added)}]" in (ROOT / "compose.yaml").read_text()
            assert max(APP_USERS) < 65_536  # the user ids of a pod with `hostUsers: false`


def test_only_two_deployments_use_the_api_server_and_only_in_the_namespace_of_the_apps() -> None:
    """`make test-kubernetes` checks that the roles are as small as they can be."""
    uses = {}
    for deployment in (document for document in APPS if document["kind"] == "Deployment"):
        pod, name = deployment["spec"]["template"]["spec"], deployment["metadata"]["name"]
        (container,) = containers(deployment)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        if pod["automountServiceAccountToken"]:
            uses[name] = pod["serviceAccountName"]
    assert uses == {"gateway": "gateway", "sites": "sites"}
    roles = {document["metadata"]["name"]: document for document in APPS if document["kind"] == "Role"}
    bindings = [document for document in APPS if document["kind"] == "RoleBinding"]
    assert {binding["roleRef"]["name"]: binding["subjects"][0]["name"] for binding in bindings} == uses
    (configuration,) = [document for document in APPS if identity(document) == ("ConfigMap", "capsule", "capsule")]
    namespace = configuration["data"]["GATEWAY_KUBERNETES_NAMESPACE"]
    assert {document["metadata"]["namespace"] for document in [*roles.values(), *bindings]} == {namespace}
    assert not any("*" in rule["verbs"] + rule["resources"] for role in roles.values() for rule in role["rules"])
    (apps,) = [document for document in APPS if identity(document) == ("Namespace", "", namespace)]
    assert apps["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_secrets_are_references() -> None:
    assert not list_documents("Secret")
    assert not SECRET & {name for document in list_documents("ConfigMap") for name in document["data"]}
    for deployment in list_documents("Deployment"):
        for container in containers(deployment):
            for variable in container.get("env", []):
                if "value" in variable:
                    assert variable["name"] not in SECRET
                    continue
                reference = variable["valueFrom"]["secretKeyRef"]
                assert f"--from-literal={reference['key']}=" in README or f"--from-file={reference['key']}=" in README
    hosting = {v["name"] for p in list_pods("capsule-hosting") for c in p["spec"]["containers"] for v in c["env"]}
    assert hosting.isdisjoint({"GATEWAY_OPERATOR_TOKEN", "GATEWAY_PROVIDER_KEY"})


def test_the_configuration_is_the_same_in_both_namespaces() -> None:
    gateways, hosting = (
        find_document("ConfigMap", namespace, "capsule")["data"] for namespace in ("capsule", "capsule-hosting")
    )
    shared = gateways.keys() & hosting.keys()
    assert {"GATEWAY_BASE_URL", "GATEWAY_APPS_DOMAIN", "GATEWAY_STORAGE_URL"} <= shared
    assert {name: gateways[name] for name in shared} == {name: hosting[name] for name in shared}


@pytest.mark.parametrize("namespace", ["capsule", "capsule-hosting"])
def test_network_policies_deny_by_default(namespace: str) -> None:
    policies = {
        d["metadata"]["name"]: d["spec"]
        for d in list_documents("NetworkPolicy")
        if d["metadata"]["namespace"] == namespace
    }
    deny = policies.pop("default-deny")
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for spec in policies.values():
        assert any(matches(spec["podSelector"], pod["metadata"]["labels"]) for pod in list_pods(namespace))
        # A rule without peers allows all of them.
        assert all(rule.get("to") for rule in spec.get("egress", []))
        assert all(rule.get("from") for rule in spec.get("ingress", []))
        assert all(rule["ports"] for rule in [*spec.get("egress", []), *spec.get("ingress", [])])


@pytest.mark.parametrize("namespace", ["capsule", "capsule-hosting"])
def test_public_addresses_are_those_of_the_service(namespace: str) -> None:
    (rule,) = find_document("NetworkPolicy", namespace, "public-addresses")["spec"]["egress"]
    blocks = [peer["ipBlock"] for peer in rule["to"]]
    assert {block["cidr"] for block in blocks} == {"0.0.0.0/0", str(GLOBAL_V6)}
    assert sorted(network for block in blocks for network in block["except"]) == sorted(map(str, NOT_PUBLIC))


# -- agreement between manifests -----------------------------------------------------------------------------


def test_selectors_find_their_pods() -> None:
    for service in list_documents("Service"):
        if service["metadata"]["name"] == "nothing":
            continue
        found = [
            p
            for p in list_pods(service["metadata"]["namespace"])
            if service["spec"]["selector"].items() <= p["metadata"]["labels"].items()
        ]
        assert len(found) == 1
        ports = {port["name"] for container in found[0]["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    budgets = {
        (d["metadata"]["namespace"], d["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"])
        for d in list_documents("PodDisruptionBudget")
    }
    assert budgets == {(d["metadata"]["namespace"], d["metadata"]["name"]) for d in list_documents("Deployment")}
    monitor, service = (
        find_document("ServiceMonitor", "capsule", "gateway")["spec"],
        find_document("Service", "capsule", "gateway"),
    )
    assert matches(monitor["selector"], service["metadata"]["labels"])
    assert {e["port"] for e in monitor["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    assert find_autoscaler()["scaleTargetRef"]["name"] == "gateway"
    assert find_autoscaler()["minReplicas"] > 1


def test_the_routes_reach_the_services_and_hide_the_internal_paths() -> None:
    closed, hosts = set(), {}
    listeners = {
        listener["name"]: listener for listener in find_document("Gateway", "capsule", "capsule")["spec"]["listeners"]
    }
    for route in list_documents("HTTPRoute"):
        namespace = route["metadata"]["namespace"]
        for parent in route["spec"]["parentRefs"]:
            listener = listeners[parent["sectionName"]]
            allowed = listener["allowedRoutes"]["namespaces"]
            names = {"kubernetes.io/metadata.name": namespace}
            assert allowed in ({"from": "Same"}, {"from": "Selector", "selector": {"matchLabels": names}})
            assert (allowed["from"] == "Same") == (namespace == "capsule")
            hosts[parent["sectionName"]] = listener["hostname"]
        for rule in route["spec"]["rules"]:
            (backend,) = rule["backendRefs"]
            service = find_document("Service", namespace, backend["name"])
            assert backend["port"] in {port["port"] for port in service["spec"]["ports"]}
            if service["metadata"]["name"] == "nothing":
                closed |= {match["path"]["value"] for match in rule["matches"]}
            else:
                assert rule["timeouts"] == {"request": "0s"}, "streams may be long"
    assert closed == {"/health", "/ready", "/metrics"}
    assert find_document("EnvoyProxy", "capsule", "capsule")["spec"]["telemetry"]["accessLog"]["disable"] is True
    data = find_document("ConfigMap", "capsule", "capsule")["data"]
    assert hosts.pop("api") == data["GATEWAY_BASE_URL"].removeprefix("https://")
    assert hosts.pop("apps") == f"*.{data['GATEWAY_APPS_DOMAIN']}"
    assert all(tuple(listener["tls"]) == ("mode", "certificateRefs") for listener in listeners.values())
    assert len(hosts) == len(listeners) - 2


def test_autoscaled_deployments_have_no_replicas() -> None:
    """`kubectl apply` would reset the autoscaler's number: 57 of 60 pods would end, and cut their streams."""
    assert "replicas" not in find_document("Deployment", "capsule", "gateway")["spec"]
    scaled = build(FOLDER / "keda")
    targets = [d for d in scaled if d["kind"] == "ScaledObject"]
    assert {d["metadata"]["name"] for d in targets} == {"webhooks", "deploys"}
    metrics = Metrics(PRICES).registry
    known = {metric.name for metric in metrics.collect()}
    for target in targets:
        namespace, name = target["metadata"]["namespace"], target["spec"]["scaleTargetRef"]["name"]
        (deployment,) = [d for d in scaled if identity(d) == ("Deployment", namespace, name)]
        assert "replicas" not in deployment["spec"]
        (trigger,) = target["spec"]["triggers"]
        assert re.fullmatch(r"max\((\w+)\)", trigger["metadata"]["query"])[1] in known  # type: ignore[index]
