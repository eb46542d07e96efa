"""Control groups of version 2, tested by the files that the kernel would read. `test_keeper.py` tests the bounds."""

import os
from pathlib import Path

import pytest

from workers.sandbox import cgroups
from workers.sandbox.cgroups import Cgroup, read_available_memory


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids cpu")
    return tmp_path


def test_one_group_bounds_everything(parent: Path) -> None:
    group = Cgroup([str(parent)], memory=1 << 20, processes=7, cpus=0.5)
    folder = parent / f"capsule-{os.getpid()}"
    written = {path.name: path.read_text() for path in folder.iterdir()}
    limits = {"memory.max": "1048576", "memory.swap.max": "0", "pids.max": "7", "cpu.max": "50000 100000"}
    assert written == limits
    group.attach(41)
    assert group.list_processes() == [41]
    for memory, pids, expected in ((0, 0, ""), (0, 2, "processes"), (1, 2, "memory")):
        (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {memory}\n")
        (folder / "pids.events").write_text(f"max {pids}\n")
        assert group.find_exceeded() == expected


def test_groups_of_killed_keepers_are_removed(parent: Path) -> None:
    (parent / "capsule-4999999").mkdir()
    (parent / "capsule-4999999-keeper").mkdir()
    (parent / f"capsule-{os.getppid()}").mkdir()
    (parent / f"capsule-{os.getppid()}-keeper").mkdir()
    Cgroup([str(parent)], memory=1, processes=1, cpus=1)
    assert sorted(path.name for path in parent.glob("capsule-*")) == sorted(
        [f"capsule-{os.getppid()}", f"capsule-{os.getppid()}-keeper", f"capsule-{os.getpid()}"]
    )


def test_processes_move_out_of_a_group_that_bounds_others(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container sees its own group as the root."""
    control = parent / "cgroup.subtree_control"
    control.write_text("")
    (parent / "cgroup.procs").write_text("1\n23\n")
    moved: list[str] = []
    write_text = Path.write_text

    def write(path: Path, text: str) -> int:
        if path == control and not moved:
            raise OSError(16, "Device or resource busy")
        if path.name == "cgroup.procs":
            moved.append(text)
        return write_text(path, text)

    monkeypatch.setattr(Path, "write_text", write)
    assert cgroups._prepare(parent)
    assert moved == ["1", "23"]
    assert control.read_text() == "+memory +pids +cpu"


def test_available_memory(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = parent / "meminfo"
    monkeypatch.setattr(cgroups, "MEMORY_INFO", info)
    assert read_available_memory() > 1 << 60, "a system without this file has no known limit"
    info.write_text("MemTotal:  8000 kB\nMemAvailable:   5000 kB\n")
    assert read_available_memory() == 5_000 * 1_024
    (parent / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    (parent / "memory.current").write_text("5000\n")
    (parent / "memory.max").write_text("max\n")
    assert read_available_memory() == 5_000 * 1_024
    (parent / "memory.max").write_text("6000\n")
    assert read_available_memory() == 2_000
