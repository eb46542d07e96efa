"""Reads what a process uses from /proc."""

import os
from pathlib import Path

from tests.support.gateway_process import Gateway

TICKS = os.sysconf("SC_CLK_TCK")


def find_pid(gateway: Gateway) -> int:
    assert gateway.process
    return gateway.process.pid


def read_cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def read_memory(pid: int) -> float:
    """Returns the resident memory in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1_048_576


def count_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
