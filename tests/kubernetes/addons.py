"""What a cluster has beside Kubernetes itself: an ingress controller, network policies that hold, and volumes."""

import asyncio
import contextlib
import ipaddress
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp

from gateway.cancellation import run_in_background
from tests.support.background import cancel
from tests.support.redis_servers import free_port

RETRY_SECONDS = 0.1


class Watching:
    """Follows objects through the API: the newest known state of each, also while the API server is away.

    `objects` has them by kind and by namespace and name. `changed` is set at each change. A subclass acts on them
    meanwhile, with `session`.
    """

    session: aiohttp.ClientSession

    def __init__(self, server: str, token: str, paths: Mapping[str, str]) -> None:
        self.server, self.token, self.paths = server, token, paths
        self.objects: dict[str, dict[tuple[str, str], Any]] = {kind: {} for kind in paths}
        self.changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        headers = {"Authorization": f"Bearer {self.token}"}
        async with aiohttp.ClientSession(
            self.server, headers=headers, connector=aiohttp.TCPConnector(ssl=trust), read_bufsize=1 << 22
        ) as session:
            self.session = session
            tasks = [asyncio.create_task(self._follow(session, kind)) for kind in self.paths]
            tasks.append(asyncio.create_task(self.act()))
            try:
                yield self
            finally:
                await cancel(*tasks)

    async def act(self) -> None:
        """Runs until it is canceled, or ends at once."""

    async def _follow(self, session: aiohttp.ClientSession, kind: str) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, KeyError, ValueError):
                async with session.get(self.paths[kind]) as answer:
                    listed = json.loads(await answer.read())
                self.objects[kind] = {name_of(each): each for each in listed["items"]}
                self.changed.set()
                since = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"]}
                async with session.get(
                    self.paths[kind], params=since, timeout=aiohttp.ClientTimeout(total=None)
                ) as answer:
                    async for line in answer.content:
                        change = json.loads(line)
                        self.objects[kind].pop(name_of(change["object"]), None)
                        if change["type"] != "DELETED":
                            self.objects[kind][name_of(change["object"])] = change["object"]
                        self.changed.set()
            await asyncio.sleep(RETRY_SECONDS)


def name_of(item: Any) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


HEAD_BYTES = PIECE_BYTES = 65_536


class Ingress(Watching):
    """Passes requests to `port` of 127.0.0.1 on to the pods, as the cluster's Ingresses say.

    Each request has a connection of its own, so the next one goes to the addresses that the EndpointSlices name by
    then. A running one ends where it began. No request is repeated, so a test sees each failure.
    """

    def __init__(self, server: str, token: str, *, slices: str) -> None:
        """`slices`: the version of the API of EndpointSlices."""
        paths = {
            "ingresses": "/apis/networking.k8s.io/v1/ingresses",
            "slices": f"/apis/discovery.k8s.io/{slices}/endpointslices",
        }
        super().__init__(server, token, paths)
        self.port = free_port()
        self.connections = 0
        self.answering: set[asyncio.Task[None]] = set()  # the event loop itself does not keep them

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        async with super().running():
            listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=HEAD_BYTES, backlog=4096)
            try:
                yield self
            finally:
                listener.close()
                await cancel(*self.answering)

    def find_pods(self, host: str, path: str) -> list[tuple[str, int]]:
        """Returns addresses and ports of the pods that answer for a path of a host name."""
        rules = [
            (len(rule["path"]), namespace, rule["backend"]["service"]["name"])
            for (namespace, _), ingress in self.objects["ingresses"].items()
            for each in ingress["spec"].get("rules", ())
            if each.get("host") == host
            for rule in each["http"]["paths"]
            if f"{path}/".startswith(f"{rule['path'].rstrip('/')}/")
        ]
        _, namespace, service = max(rules, default=(0, "", ""))
        return [
            (address, port["port"])
            for (of, _), each in self.objects["slices"].items()
            if (of, each["metadata"]["labels"]["kubernetes.io/service-name"]) == (namespace, service)
            for endpoint in each.get("endpoints") or ()
            if endpoint.get("conditions", {}).get("ready", True)
            for address in endpoint["addresses"]
            for port in each["ports"]
        ]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answering.add(task := asyncio.create_task(self._answer(reader, writer)))
        task.add_done_callback(self.answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            headers = [(name.strip().lower(), line) for line in lines for name in [line.partition(b":")[0]]]
            host = next((line.partition(b":")[2].strip().decode() for name, line in headers if name == b"host"), "")
            kept = [line for name, line in headers if name != b"connection" and not name.startswith(b"x-forwarded")]
            upgrade = any(name == b"upgrade" for name, _ in headers)
            kept += [b"Connection: Upgrade" if upgrade else b"Connection: close", b"X-Forwarded-For: 203.0.113.7"]
            kept += [b"X-Forwarded-Proto: http", f"X-Forwarded-Host: {host}".encode()]
            self.connections += 1
            path = first.split(b" ")[1].partition(b"?")[0].decode()
            pods = self.find_pods(host.partition(":")[0], path)
            try:
                from_pod, to_pod = await asyncio.open_connection(*pods[self.connections % len(pods)])
            except (OSError, ZeroDivisionError):  # no pod answers, or there is none
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                to_pod.write(b"\r\n".join([first, *kept, b"", b""]))
                with contextlib.closing(to_pod):
                    async with run_in_background(copy(reader, to_pod)):
                        await copy(from_pod, writer)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()


Rule = list[str]
EGRESS, INGRESS = "0x1", "0x2"  # bits of the mark


class Policies(Watching):
    """Enforces the network policies of the apps' namespace on this machine, as a cluster's network does.

    All packets of pods are routed by this machine, so they pass one chain of iptables: packets that a policy allows get
    a mark for each direction, and others are refused. As in most clusters, the node itself reaches all pods.
    """

    def __init__(self, server: str, token: str, chain: str) -> None:
        paths = {"pods": "/api/v1/pods", "policies": "/apis/networking.k8s.io/v1/networkpolicies"}
        super().__init__(server, token, paths)
        self.chain = chain

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        iptables("--new-chain", self.chain)
        for hook in ("FORWARD", "INPUT"):
            iptables("--insert", hook, "--jump", self.chain)
        try:
            async with super().running():
                yield self
        finally:
            for hook in ("FORWARD", "INPUT"):
                iptables("--delete", hook, "--jump", self.chain)
            iptables("--flush", self.chain)
            iptables("--delete-chain", self.chain)

    async def act(self) -> None:
        while True:
            await self.changed.wait()
            self.changed.clear()
            rules = "\n".join(f"-A {self.chain} {' '.join(rule)}" for rule in self.make_rules())
            text = f"*filter\n:{self.chain} - [0:0]\n{rules}\nCOMMIT\n"
            await asyncio.to_thread(
                subprocess.run, ["iptables-restore", "--noflush", "--wait"], input=text, text=True, check=True
            )

    def make_rules(self) -> Iterator[Rule]:
        yield ["-m conntrack --ctstate ESTABLISHED,RELATED", "-j RETURN"]
        isolated: list[tuple[str, str]] = []
        yield ["-j MARK --set-xmark 0x0/0x3"]
        for (namespace, _), policy in self.objects["policies"].items():
            spec = policy["spec"]
            for pod in self._find_pods(namespace, spec["podSelector"]):
                for kind, own, other, mark in (("Egress", "-s", "-d", EGRESS), ("Ingress", "-d", "-s", INGRESS)):
                    if kind in spec["policyTypes"]:
                        isolated.append((f"{own} {pod}", mark))
                        for rule in spec.get(kind.lower(), ()):
                            peers = rule.get("to" if kind == "Egress" else "from")
                            for peer in self._find_peers(namespace, peers, other):
                                for port in list_ports(rule):
                                    yield [f"{own} {pod}", peer, port, f"-j MARK --or-mark {mark}"]
        for pod, mark in isolated:
            yield [pod, f"-m mark ! --mark {mark}/{mark}", "-j REJECT"]

    def _find_pods(self, namespace: str, selector: dict[str, Any]) -> list[str]:
        return [
            pod["status"]["podIP"]
            for (of, _), pod in self.objects["pods"].items()
            if namespace in (of, "*")
            and matches(selector, pod["metadata"].get("labels", {}))
            and "podIP" in pod["status"]
        ]

    def _find_peers(self, namespace: str, peers: list[Any] | None, side: str) -> Iterator[str]:
        if not peers:
            yield ""
        for peer in peers or ():
            if block := peer.get("ipBlock"):
                yield from (f"{side} {network}" for network in list_networks(block))
            else:
                within = peer.get("namespaceSelector")
                labels = (within or {}).get("matchLabels", {})
                where = labels.get("kubernetes.io/metadata.name", "*") if within is not None else namespace
                yield from (f"{side} {pod}" for pod in self._find_pods(where, peer.get("podSelector", {})))


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for each in selector.get("matchExpressions", ()):
        if (labels.get(each["key"]) in each["values"]) != {"In": True, "NotIn": False}[each["operator"]]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def list_networks(block: dict[str, Any]) -> list[ipaddress.IPv4Network]:
    """Returns the networks of IPv4 that a block consists of without its exceptions. Pods here have no IPv6."""
    if ":" in block["cidr"]:
        return []
    networks = [ipaddress.IPv4Network(block["cidr"])]
    for excluded in map(ipaddress.IPv4Network, block.get("except", ())):
        parts = [list(each.address_exclude(excluded)) if excluded.subnet_of(each) else [each] for each in networks]
        networks = [network for part in parts for network in part]
    return networks


def list_ports(rule: dict[str, Any]) -> list[str]:
    if "ports" not in rule:
        return [""]
    return [
        f"-p {port.get('protocol', 'TCP').lower()}" + (f" --dport {port['port']}" if "port" in port else "")
        for port in rule["ports"]
    ]


def iptables(*arguments: str) -> None:
    subprocess.run(["iptables", "--wait", *arguments], check=True, capture_output=True)


CLASS = "folders"
STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "tests/folders",
}
VOLUMES = "/api/v1/persistentvolumes"


class Volumes(Watching):
    """Provides volumes of the class `CLASS`, which is the cluster's default. `paused`: claims wait.

    Each is a folder of this machine, which cannot be enlarged or attached to another node, and bounds no size.
    """

    def __init__(self, server: str, token: str, folder: Path) -> None:
        super().__init__(server, token, {"claims": "/api/v1/persistentvolumeclaims", "volumes": VOLUMES})
        self.folder, self.paused = folder, False

    async def act(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                for claim in list(self.objects["claims"].values()):
                    if claim["status"].get("phase") == "Pending" and not self.paused:
                        await self._make(claim)
                for (_, name), volume in list(self.objects["volumes"].items()):
                    if volume["status"].get("phase") == "Released":
                        await self.session.delete(f"{VOLUMES}/{name}")
                        shutil.rmtree(self.folder / name, ignore_errors=True)
            await asyncio.sleep(0.1)

    async def _make(self, claim: Any) -> None:
        name = f"folder-{claim['metadata']['uid']}"
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / name).chmod(0o777)
        reference = {key: claim["metadata"][key] for key in ("name", "namespace", "uid")}
        spec = {
            "accessModes": claim["spec"]["accessModes"],
            "capacity": claim["spec"]["resources"]["requests"],
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **reference},
            "hostPath": {"path": str(self.folder / name)},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": claim["spec"].get("storageClassName", ""),
        }
        volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
        async with self.session.post(VOLUMES, json=volume) as answer:
            assert answer.status in (201, 409), await answer.text()
