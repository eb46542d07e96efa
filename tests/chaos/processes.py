"""Runs the service's processes, and restarts them a second after they were killed, as a supervisor does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

RESTART_SECONDS = 1.0  # between the end of a process and its restart


class Process:
    """A process of the service. `ends` lists its exits that no fault caused: each is a violation."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.log_file = name, log
        self.command, self.environment = command, dict(environment)
        self.frozen = False
        self.started_at = 0.0
        self.ends: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._ended_at = 0.0

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log_file.parent,
                start_new_session=True,
            )
        self._killed, self.frozen, self.started_at = False, False, time.monotonic()

    def kill(self) -> None:
        if self._process is not None:
            self._killed = True
            self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self.frozen = False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def supervise(self) -> None:
        """Restarts the process if it has ended. Call this often."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        now = time.monotonic()
        if not self._ended_at:
            self._ended_at = now
            if not self._killed:
                self.ends.append(f"{self.name} ended by itself with status {code}; its log is {self.log_file.name}")
        elif now > self._ended_at + RESTART_SECONDS:
            self._ended_at = 0.0
            self.start()

    async def stop(self) -> None:
        if self._process is None:
            return
        self.thaw()
        self._signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self._process.wait, 15)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process = None


class Fleet:
    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}

    def add(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Process:
        basics = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": os.getcwd()}
        process = Process(name, command, {**basics, **environment}, folder / f"{name}.log")
        self.processes[name] = process
        return process

    def find_by_kind(self, kind: str) -> list[Process]:
        return [process for name, process in self.processes.items() if name.startswith(f"{kind}-")]

    async def supervise(self) -> None:
        while True:
            for process in self.processes.values():
                process.supervise()
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self.processes.values()))
