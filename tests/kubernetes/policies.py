"""Enforces the network policies of the apps' namespace on this machine, as a cluster's network does.

All packets of pods are routed by this machine, so they pass one chain of iptables: packets that a policy allows get a
mark for each direction, and others are refused. As in most clusters, the node itself reaches all pods.
"""

import asyncio
import contextlib
import ipaddress
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

from tests.kubernetes.watching import Watching

Rule = list[str]
EGRESS, INGRESS = "0x1", "0x2"  # bits of the mark


class Policies(Watching):
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
