"""A real Kubernetes on this machine: etcd, the API server, controllers, a scheduler, and one node with containerd.

It needs root and Debian 12, and is Kubernetes 1.20, Debian's newest, with a newer kubectl. The binaries are made once
(`build`) and kept; KUBERNETES_BIN names a folder that has them already. Pods have addresses that this machine reaches.
There is no DNS, no kube-proxy, no ingress controller, no volumes and nobody who enforces network policies (but
`addons.py`), and this version knows no Pod Security.

`python -m tests.kubernetes.cluster` starts a cluster, prints its KUBECONFIG, and ends it on Ctrl-C.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.image import CACHE, NAME, make_image, run, write_image
from tests.support.kubeconfig import describe_access
from tests.support.redis_servers import free_port

HERE = Path(__file__).parent
START_SECONDS = 120.0
OLDEST_KUBECTL = (1, 21)  # that builds the kustomizations of ops/kubernetes
NODE = "node-1"
PAUSE = "localhost/pause:1"
# With the names of the programs' packages in Debian.
PROGRAMS = {
    "containerd": "containerd",
    "debootstrap": "debootstrap",
    "dpkg-source": "dpkg-dev",
    "etcd": "etcd-server",
    "gcc": "gcc",
    "go": "golang-go",
    "ip": "iproute2",
    "make": "make",
    "rsync": "rsync",
    "/bin/busybox": "busybox-static",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "iptables": "iptables",
}


# Records what service accounts of our own namespace ask for.
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts:capsule"]}],
}


def find_binaries() -> Path:
    """Returns the folder of Kubernetes' programs, which are built first if necessary."""
    if given := os.environ.get("KUBERNETES_BIN"):
        return Path(given)
    folder = CACHE / f"bin-{hashlib.sha256((HERE / 'build').read_bytes()).hexdigest()[:16]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            run(HERE / "build", f"{scratch}/bin", timeout=3600)
            os.replace(f"{scratch}/bin", folder)
    return folder


def check_kubectl(kubectl: Path) -> None:
    version = json.loads(run(kubectl, "version", "--client", "--output=json"))["clientVersion"]
    found = int(version["major"]), int(version["minor"].rstrip("+"))
    oldest = ".".join(map(str, OLDEST_KUBECTL))
    assert found >= OLDEST_KUBECTL, f"{kubectl} is {version['gitVersion']}, and ops/kubernetes needs {oldest} or newer"


def install_programs() -> None:
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if missing:
        run("apt-get", "update", "-q")
        run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-qy", "--no-install-recommends", *missing)


class Cluster:
    """A running cluster, used by kubectl."""

    def __init__(self, kubeconfig: Path, kubectl: str | Path = "kubectl") -> None:
        self.kubeconfig = kubeconfig
        self._kubectl = [str(kubectl), f"--kubeconfig={kubeconfig}", "--request-timeout=20s"]

    def kubectl(self, *arguments: str) -> str:
        return run(*self._kubectl, *arguments)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", "-o", "json", *arguments))

    def find(self, kind: str, namespace: str, labels: str = "") -> list[Any]:
        selector = ["-l", labels] if labels else []
        items: list[Any] = self.get(kind, "-n", namespace, *selector)["items"]
        return items

    def apply(self, documents: Any) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump_all(documents, file)
            file.flush()
            self.kubectl("apply", "-f", file.name)

    def read_access(self) -> tuple[str, Any]:
        """Returns the API server's address, and the whole kubeconfig."""
        access = json.loads(self.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
        return access["clusters"][0]["cluster"]["server"], access

    def write_kubeconfig(self, file: Path, token: str) -> None:
        """Lets the owner of the token use the cluster."""
        _, access = self.read_access()
        access["users"][0]["user"] = {"token": token}
        file.touch(0o600)
        file.write_text(json.dumps(access))


class OwnCluster(Cluster):
    """A cluster of this machine. Its parts are etcd, api, controllers, scheduler, containerd and kubelet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        CACHE.mkdir(parents=True, exist_ok=True)
        install_programs()
        self.binaries = find_binaries()
        super().__init__(folder / "kubeconfig", self.binaries / "kubectl")
        self.socket = folder / "containerd.sock"
        self.ports = {name: free_port() for name in ("etcd", "peers", "api", "controllers", "scheduler", "kubelet")}
        self.number = self.ports["api"]  # distinguishes this cluster from others on the machine
        self.name = f"kube-{self.number}"
        self.address = run("hostname", "-I").split()[0]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    # -- its parts ---------------------------------------------------------------------------------------

    def start_all(self) -> None:
        self._write_files()
        self.start("etcd")
        self.start("api")
        self.wait_until(self.answers)
        self.start("controllers")
        self.start("scheduler")
        self.start("containerd")
        self.wait_until(lambda: self._ctr("version"))
        self._import_images()
        self.start("kubelet")
        self.wait_until(self.is_ready)

    def start(self, part: str) -> None:
        with (self.folder / f"{part}.log").open("ab") as log:
            self.processes[part] = subprocess.Popen(
                self._command(part), cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def name_image(self, name: str) -> None:
        """Gives the image one more name on the node."""
        run(*self._ctr_command, "images", "tag", NAME, name)

    def kill(self, part: str) -> None:
        process = self.processes.pop(part)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Ends all parts and pods, and removes their networks, mounts and control groups."""
        if "kubelet" in self.processes:
            self.kill("kubelet")
        if "containerd" in self.processes:
            networks = {self._find_network(name) for name in run(*self._ctr_command, "containers", "ls", "-q").split()}
            for task in run(*self._ctr_command, "tasks", "ls", "-q").split():
                self._ctr("tasks", "delete", "--force", task)
            for network in networks:
                subprocess.run(["umount", network], capture_output=True)
                network.unlink(missing_ok=True)
        for part in list(self.processes):
            self.kill(part)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((mount for mount in mounts if mount.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], capture_output=True)
        for top in self._control_groups():
            for group in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    group.rmdir()
            with contextlib.suppress(OSError):
                top.rmdir()

    def _find_network(self, container: str) -> Path:
        """Returns the file that keeps the network of a container."""
        namespaces = json.loads(run(*self._ctr_command, "containers", "info", container))["Spec"]["linux"]["namespaces"]
        return next(Path(each["path"]) for each in namespaces if each["type"] == "network")

    def answers(self) -> bool:
        return self._succeeds(*self._kubectl, "get", "--raw", "/readyz")

    def is_ready(self) -> bool:
        with contextlib.suppress(AssertionError):
            conditions = self.get("node", NODE)["status"]["conditions"]
            return {"type": "Ready", "status": "True"}.items() <= conditions[-1].items()
        return False

    def read_requests(self, account: str) -> set[tuple[str, str, int]]:
        """Returns verb, resource and status of all requests that a service account has made in the apps' namespace."""
        found = set()
        for line in (self.folder / "audit.log").read_text().splitlines():
            entry = json.loads(line)
            resource = entry.get("objectRef", {})
            if entry["user"]["username"] == f"system:serviceaccount:capsule:{account}" and "namespace" in resource:
                parts = [resource["resource"], *([resource["subresource"]] if "subresource" in resource else [])]
                found.add((entry["verb"], "/".join(parts), entry["responseStatus"]["code"]))
        return found

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Raises AssertionError, with the ends of the logs, if it takes too long or a part has ended."""
        deadline = time.monotonic() + START_SECONDS
        while not holds():
            ended = [part for part, process in self.processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = {part: (self.folder / f"{part}.log").read_text()[-2000:] for part in ended or self.processes}
                raise AssertionError("\n".join(f"{part}: {log}" for part, log in logs.items()))
            time.sleep(0.2)

    # -- how they run ------------------------------------------------------------------------------------

    @property
    def _ctr_command(self) -> list[str]:
        return ["ctr", "--address", str(self.socket), "--namespace", "k8s.io"]

    def _ctr(self, *arguments: str) -> bool:
        return self._succeeds(*self._ctr_command, *arguments)

    def _succeeds(self, *command: str) -> bool:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    def _command(self, part: str) -> list[str]:
        ports, folder = self.ports, self.folder
        if part == "etcd":
            client, peer = (f"http://127.0.0.1:{ports[name]}" for name in ("etcd", "peers"))
            return [
                *("etcd", f"--data-dir={folder}/etcd", f"--listen-client-urls={client}"),
                *(f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}", "--unsafe-no-fsync"),
                *(f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"),
            ]
        if part == "api":
            return [
                *(f"{self.binaries}/kube-apiserver", f"--etcd-servers=http://127.0.0.1:{ports['etcd']}"),
                *("--bind-address=127.0.0.1", f"--secure-port={ports['api']}", f"--cert-dir={folder}/certificates"),
                *("--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=https://kubernetes.default.svc"),
                *("--service-account-signing-key-file=accounts.key", "--service-account-key-file=accounts.pub"),
                *("--authorization-mode=RBAC", "--token-auth-file=tokens.csv", "--endpoint-reconciler-type=none"),
                *("--kubelet-preferred-address-types=InternalIP", "--audit-policy-file=audit.yaml"),
                f"--audit-log-path={folder}/audit.log",
            ]
        if part == "controllers":
            return [
                *(f"{self.binaries}/kube-controller-manager", f"--kubeconfig={self.kubeconfig}", "--port=0"),
                *("--bind-address=127.0.0.1", f"--secure-port={ports['controllers']}"),
                *(f"--cert-dir={folder}/certificates-controllers", "--use-service-account-credentials=true"),
                *("--service-account-private-key-file=accounts.key", "--root-ca-file=certificates/apiserver.crt"),
                "--leader-elect=false",  # a killed one starts at once, without waiting for its lease to end
            ]
        if part == "scheduler":
            return [
                *(f"{self.binaries}/kube-scheduler", f"--kubeconfig={self.kubeconfig}", "--port=0"),
                *("--bind-address=127.0.0.1", f"--secure-port={ports['scheduler']}", "--leader-elect=false"),
                f"--cert-dir={folder}/certificates-scheduler",
            ]
        if part == "containerd":
            return ["containerd", "--config", "containerd.toml"]
        return [
            *(f"{self.binaries}/kubelet", f"--kubeconfig={self.kubeconfig}", "--config=kubelet.yaml"),
            *(f"--root-dir={folder}/kubelet", f"--cert-dir={folder}/certificates-kubelet"),
            *("--container-runtime=remote", f"--container-runtime-endpoint=unix://{self.socket}"),
            *(f"--hostname-override={NODE}", f"--node-ip={self.address}"),
        ]

    def _control_groups(self) -> list[Path]:
        top = Path("/sys/fs/cgroup")
        hierarchies = (
            [top] if (top / "cgroup.controllers").exists() else [path for path in top.iterdir() if path.is_dir()]
        )
        return [path / self.name for path in hierarchies]

    def _write_files(self) -> None:
        run("openssl", "genrsa", "-out", self.folder / "accounts.key", "2048")
        run("openssl", "rsa", "-in", self.folder / "accounts.key", "-pubout", "-out", self.folder / "accounts.pub")
        token = secrets.token_hex(16)
        (self.folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        server, certificate = f"https://127.0.0.1:{self.ports['api']}", str(self.folder / "certificates/apiserver.crt")
        access = describe_access({"server": server, "certificate-authority": certificate}, token)
        self.kubeconfig.write_text(yaml.safe_dump(access))
        (self.folder / "audit.yaml").write_text(yaml.safe_dump(AUDIT))
        (self.folder / "containerd.toml").write_text(f"""
version = 2
root = "{self.folder}/containerd"
state = "{self.folder}/containerd-state"
[grpc]
address = "{self.socket}"
[plugins."io.containerd.grpc.v1.cri"]
restrict_oom_score_adj = true
sandbox_image = "{PAUSE}"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{self.folder}/network"
""")
        subnet = f"10.244.{self.number % 250 + 1}.0/24"
        addresses = {"type": "host-local", "ranges": [[{"subnet": subnet}]], "dataDir": f"{self.folder}/addresses"}
        # Each pod has an interface of its own here, so this machine routes all packets, and can filter them.
        plugin = {"type": "ptp", "ipMasq": False, "ipam": {**addresses, "routes": [{"dst": "0.0.0.0/0"}]}}
        (self.folder / "network").mkdir()
        network = {"cniVersion": "0.4.0", "name": self.name, "plugins": [plugin]}
        (self.folder / "network/10-test.conflist").write_text(json.dumps(network))
        for group in self._control_groups():
            group.mkdir(exist_ok=True)
            self._allow_all_processors(group)
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "address": self.address,
            "port": self.ports["kubelet"],
            "readOnlyPort": 0,
            "healthzPort": 0,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.name}",
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
        }
        (self.folder / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))

    def _allow_all_processors(self, group: Path) -> None:
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (group / name).exists() and not (group / name).read_text().strip():
                (group / name).write_text((group.parent / name).read_text())

    def _import_images(self) -> None:
        busybox = self.folder / "busybox.tar"
        run("tar", "-C", "/bin", "--transform=s,^,bin/,", "-cf", busybox, "busybox")
        write_image(self.folder / "pause.tar", PAUSE, [busybox], {"Cmd": ["/bin/busybox", "sleep", "2147483647"]})
        for image in (self.folder / "pause.tar", make_image(self.folder / "image.tar")):
            run(*self._ctr_command, "images", "import", image)


@contextlib.contextmanager
def running_cluster() -> Iterator[OwnCluster]:
    with tempfile.TemporaryDirectory(prefix="kubernetes-", dir="/var/lib", ignore_cleanup_errors=True) as folder:
        cluster = OwnCluster(Path(folder))
        try:
            cluster.start_all()
            yield cluster
        finally:
            cluster.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    with running_cluster() as cluster, contextlib.suppress(KeyboardInterrupt):
        print(f"export KUBECONFIG={cluster.kubeconfig} PATH={cluster.binaries}:$PATH  # the image: {NAME}", flush=True)
        signal.pause()
