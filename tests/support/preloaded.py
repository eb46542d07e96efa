"""Runs processes of the service. They need not import the packages they use, because they are forks of one that has.

These imports take more than half of the processor time of a start, and the tests start hundreds of processes. The
project's own modules are imported after constants are changed. The first process with certain changes imports them
itself; further ones with the same changes are forks of one that has, and so are all processes without changes.
"""

import functools
import gc
import importlib
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    *("aiohttp", "cryptography.x509", "dns.asyncresolver", "dotenv", "httptools", "httpx", "jwt", "litestar"),
    *("litestar.plugins.pydantic", "markdown_it", "prometheus_client", "redis.asyncio", "structlog", "uvicorn.main"),
    *("uvloop", "yaml"),
)
OWN = (
    *("capsule_gateway.cli.main", "gateway.app", "gateway.server.serve", "workers.builds.builder", "workers.check"),
    *("workers.child", "workers.hosting.sites", "workers.monitors.run", "workers.restarts", "workers.webhooks.sender"),
)
START_SECONDS = 180.0  # the imports take far longer on a machine that is busy with other tests
POLL_SECONDS = 0.01
MAX_BYTES = 1_000_000  # of a message


def python(module: str, constants: Mapping[str, float] = {}) -> list[str]:
    """Returns the command that runs a module, as `python -m` does.

    `constants` are changed first, such as `{"gateway.inference.auth.users.TOKEN_SECONDS": 5}`.
    """
    return [sys.executable, "-c", make_script(module, constants)] if constants else [sys.executable, "-m", module]


def make_script(module: str, constants: Mapping[str, float]) -> str:
    return f"{make_change(constants)}import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def make_change(constants: Mapping[str, float]) -> str:
    for path in constants:
        owner, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(owner), name), f"{path} does not exist"
    return f"{inspect.getsource(change_constants)}\nchange_constants({dict(constants)!r})\n" if constants else ""


def change_constants(constants: "dict[str, float]") -> None:
    """Changes constants where their modules define them, so that defaults of parameters have the new values too."""
    import ast
    from importlib.machinery import SourceFileLoader

    load = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, module: str) -> object:
        values = {path.rpartition(".")[2]: constants[path] for path in constants if path.rpartition(".")[0] == module}
        source = self.get_source(module) if values else None
        if source is None:
            return load(self, module)
        tree = ast.parse(source)
        body: list[ast.stmt] = []
        for statement in tree.body:
            body.append(statement)
            stored = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
            if isinstance(statement, ast.Assign) and (names := stored & values.keys()):
                body += ast.parse("; ".join(f"{name} = {values.pop(name)!r}" for name in names)).body
        assert not values, f"{module} does not define {[*values]}"
        tree.body = body
        return compile(tree, self.path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def launch(
    module: str,
    arguments: Sequence[str],
    constants: Mapping[str, float],
    env: Mapping[str, str],
    cwd: Path,
    log_file: Path,
    wrapper: Sequence[str] = (),
) -> "Running":
    """Runs a module as `python -m` does. A `wrapper` is a command that starts another one.

    That one is not preloaded, nor is a process whose environment changes how Python starts.
    """
    with log_file.open("ab") as log:
        if wrapper or any(name.startswith("PYTHON") for name in env):
            command = [*wrapper, *python(module, constants), *arguments]
            return subprocess.Popen(command, env=env, cwd=cwd, stdout=log, stderr=log)
        changes = tuple(sorted(constants.items()))
        known = changes if not changes or changes in _used else None
        _used.add(changes)
        script = make_script(module, constants if known is None else {})
        request = {"script": script, "arguments": arguments, "env": env, "cwd": str(cwd)}
        request["nice"] = os.getpriority(os.PRIO_PROCESS, 0)
        parent = _find_parent(known)
        return Process(parent, parent.start(request, log.fileno()), [module, *arguments])


class Process:
    """A process of `launch`, with the methods of `subprocess.Popen`."""

    def __init__(self, parent: "Parent", pid: int, args: Sequence[str]) -> None:
        self._parent, self.pid, self.args = parent, pid, args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.find_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        ends = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Parent:
    """A process that has imported what others need. It ends when this process does."""

    def __init__(self, control: socket.socket, process: object = None) -> None:
        """`process`: what has to be kept while this exists."""
        self._control, self._process = control, process
        self._lock, self._codes = threading.Lock(), dict[int, int]()

    def start(self, request: dict[str, Any], descriptor: int) -> int:
        """Returns the process id."""
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], [descriptor])
            ends = time.monotonic() + START_SECONDS
            while (message := self._receive(ends - time.monotonic())) is not None:
                if "started" in message:
                    self._codes.pop(message["started"], None)  # of an earlier process with the same id
                    return int(message["started"])
        raise TimeoutError("the process was not forked")

    def find_code(self, pid: int) -> int | None:
        """Returns the exit code of a process, or None if it still runs."""
        with self._lock:
            while self._receive(0) is not None:
                pass
            return self._codes.pop(pid, None)

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next message, or None after so many seconds."""
        if not select.select([self._control], [], [], max(seconds, 0))[0]:
            return None
        message: dict[str, Any] = json.loads(self._control.recv(MAX_BYTES) or b"{}")
        if not message:
            raise RuntimeError("the process with the imported packages has ended")
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


Changes = tuple[tuple[str, float], ...]  # of constants, in order
Running = subprocess.Popen[bytes] | Process


_used = set[Changes]()


@functools.cache
def _find_parent(changes: Changes | None) -> Parent:
    """Returns the parent of processes with these changes, or for None of those that import our modules themselves."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        if changes is not None:
            request = {"imports": OWN, "script": make_change(dict(changes))}
            _find_parent(None).start(request, theirs.fileno())
            return Parent(control)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.preloaded", str(theirs.fileno())],
            cwd=Path(__file__).parents[2],
            env={"PATH": os.environ["PATH"]},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        return Parent(control, process)


# -- in the parent -------------------------------------------------------------------------------------------


def fork_on_request(control: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Forks for each request. Returns it and its descriptor in the new process, and None at the parent's end."""
    wake, wakes = os.pipe()
    for end in (wake, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if control in ready:
            text, logs, _, _ = socket.recv_fds(control, MAX_BYTES, 1)
            if not text:
                return None
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(wake)
                os.close(wakes)
                control.close()
                return json.loads(text), logs[0]
            os.close(logs[0])
            control.send(json.dumps({"started": pid}).encode())
        if wake in ready:
            os.read(wake, MAX_BYTES)
            for pid, code in reap():
                control.send(json.dumps({"ended": pid, "code": code}).encode())


def reap() -> list[tuple[int, int]]:
    """Returns the ids and exit codes of the processes that have ended."""
    ended: list[tuple[int, int]] = []
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    except ChildProcessError:
        pass
    return ended


def run(request: dict[str, Any], log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Those of the parent have looked at the file that was there before.
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    sys.argv = ["-c", *request["arguments"]]
    exec(request["script"], {})


def main(control: socket.socket) -> None:
    imports: Sequence[str] = PACKAGES
    while True:
        for module in imports:
            importlib.import_module(module)
        gc.freeze()
        if (requested := fork_on_request(control)) is None:
            return
        request, descriptor = requested
        if "imports" not in request:
            run(request, descriptor)
            return
        exec(request["script"], {})
        imports, control = request["imports"], socket.socket(fileno=descriptor)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
