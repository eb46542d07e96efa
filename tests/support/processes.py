"""Runs the processes of the service, and reads their logs and what /proc says of them."""

import asyncio
import base64
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.preloaded import Running, launch

ENCRYPTION_KEY = base64.urlsafe_b64encode(os.urandom(32)).decode()
TICKS = os.sysconf("SC_CLK_TCK")


def limit_descriptors(option: str) -> Sequence[str]:
    """Returns the prefix of a command that sets its limit, with an option of `ulimit` such as `-n 256`."""
    return ("/bin/sh", "-c", f'ulimit {option}; exec "$@"', "sh")


def list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class ServiceProcess:
    """A process of the service, with some constants changed. Empty settings are left out.

    Its log, even at the debug level, must have nothing confidential, and no traceback unless the test allows one.
    """

    def __init__(
        self,
        log_file: Path,
        confidential: set[str],
        constants: Mapping[str, float],
        prefix: Sequence[str],
        settings: Mapping[str, str],
    ) -> None:
        self.folder, self.log_file = log_file.parent, log_file
        self.confidential, self.tracebacks_allowed = confidential, False
        self.constants, self.prefix = constants, prefix  # of the command
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "GATEWAY_ENCRYPTION_KEY": ENCRYPTION_KEY,
            "GATEWAY_ALLOW_PRIVATE_ADDRESSES": "true",
            "GATEWAY_LOG_LEVEL": "debug",
            **settings,
        }
        self.environment = {name: value for name, value in environment.items() if value}
        self.process: Running | None = None

    def launch(self, module: str, *arguments: str) -> None:
        self.process = launch(
            module, arguments, self.constants, self.environment, self.folder, self.log_file, self.prefix
        )

    async def stop(self, timeout: float = 20) -> int | None:
        """Sends SIGTERM, and returns the exit code. Fails for a process that has to be killed."""
        if not self.process:
            return None
        self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self.process.wait, timeout)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    @property
    def code(self) -> int | None:
        """The exit code of a process that has ended by itself."""
        assert self.process
        return self.process.poll()

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    @property
    def memory(self) -> float:
        """Resident memory in MiB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def descriptors(self) -> int:
        """The number of open ones."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def find_secrets(self, text: bytes) -> list[str]:
        return [secret for secret in (ENCRYPTION_KEY, *self.confidential) if secret.encode() in text]

    def assert_log_is_clean(self) -> None:
        log = self.log
        leaked = self.find_secrets(log.encode())
        assert not leaked, f"the log contains {leaked}"
        if not self.tracebacks_allowed:
            for sign in ("Traceback", "never retrieved", "never awaited", "Unclosed"):
                assert sign not in log, log[max(0, log.index(sign) - 1000) :][:4000]
