from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from loramux.engine.device.machine_limits import free_memory, num_cpus
from loramux.engine.loop.config import EngineConfig

GIB = 1 << 30
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a machine with 64 GiB of memory, without the limits of a cgroup."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable:   {48 << 20} kB\nBuffers: 1 kB\n")
    return tmp_path


def write(root: Path, path: str, content: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{content}\n")


def version_2(root: Path, cgroup: str, folder: str, cpu_max: str, memory_max: str, current: int) -> None:
    write(root, "proc/self/cgroup", f"0::{cgroup}")
    write(root, f"sys/fs/cgroup{folder}/cpu.max", cpu_max)
    write(root, f"sys/fs/cgroup{folder}/memory.max", memory_max)
    write(root, f"sys/fs/cgroup{folder}/memory.current", current)
    counts = f"anon 5\nfile 9\ninactive_file {GIB}\nactive_file {GIB}\n\nthree words here"
    write(root, f"sys/fs/cgroup{folder}/memory.stat", counts)


def test_without_cgroups_the_machine_is_the_limit(root: Path) -> None:
    assert (num_cpus(root), free_memory(root)) == (16, 48 * GIB)


@pytest.mark.parametrize(
    ("cgroup", "folder"),
    [
        pytest.param("/", "", id="a container with a namespace of its own"),
        pytest.param("/kubepods/pod-1/abc", "", id="a container without one"),
        pytest.param("/system.slice/loramux.service", "/system.slice/loramux.service", id="a service"),
        pytest.param("/system.slice/loramux.service", "/system.slice", id="a slice"),
    ],
)
def test_limits_of_version_2(root: Path, cgroup: str, folder: str) -> None:
    version_2(root, cgroup, folder, "400000 100000", str(8 * GIB), 5 * GIB)
    # 2 GiB of the 5 GiB in use are cached files.
    assert (num_cpus(root), free_memory(root)) == (4, 5 * GIB)


def test_the_smallest_limit_counts(root: Path) -> None:
    version_2(root, "/a/b", "/a", "300000 100000", str(40 * GIB), 2 * GIB)
    version_2(root, "/a/b", "/a/b", "1200000 100000", str(4 * GIB), 3 * GIB)
    assert (num_cpus(root), free_memory(root)) == (3, 3 * GIB)


@pytest.mark.parametrize(("quota", "cpus"), [("50000 100000", 1), ("250000 100000", 2), ("6400000 100000", 16)])
def test_a_quota_counts_in_whole_processors(root: Path, quota: str, cpus: int) -> None:
    version_2(root, "/", "", quota, "max", 5 * GIB)
    assert (num_cpus(root), free_memory(root)) == (cpus, 48 * GIB)


def test_memory_beyond_the_limit_is_none(root: Path) -> None:
    version_2(root, "/", "", "max 100000", str(GIB), 5 * GIB)
    assert (num_cpus(root), free_memory(root)) == (16, 0)


@pytest.mark.parametrize("folder", ["", "/docker/abc"], ids=["in the container", "on the host"])
def test_limits_of_version_1(root: Path, folder: str) -> None:
    cgroups = "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:cpuset:/docker/abc\n0::/"
    write(root, "proc/self/cgroup", cgroups)
    write(root, f"sys/fs/cgroup/cpu{folder}/cpu.cfs_quota_us", 150000)
    write(root, f"sys/fs/cgroup/cpu{folder}/cpu.cfs_period_us", 50000)
    write(root, f"sys/fs/cgroup/memory{folder}/memory.limit_in_bytes", 8 * GIB)
    write(root, f"sys/fs/cgroup/memory{folder}/memory.usage_in_bytes", 5 * GIB)
    counts = f"inactive_file 7\nactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    write(root, f"sys/fs/cgroup/memory{folder}/memory.stat", counts)
    assert (num_cpus(root), free_memory(root)) == (3, 4 * GIB)


def test_version_1_without_limits(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:memory:/\n3:cpu,cpuacct:/")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", -1)
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", 100000)
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", 5 * GIB)
    assert (num_cpus(root), free_memory(root)) == (16, 48 * GIB)


def test_nothing_else_counts_processors() -> None:
    parts = ("adapter_store", "admin", "engine", "kernels", "migrations", "platform")
    sources = {path.relative_to(ROOT): path.read_text() for part in parts for path in (ROOT / part).rglob("*.py")}
    counting = [str(path) for path, text in sources.items() if re.search(r"sched_getaffinity|cpu_count", text)]
    assert counting == ["engine/device/machine_limits.py"]


def test_an_engine_uses_as_many_threads_as_it_has_processors() -> None:
    defaults = {field.name: field.default_factory for field in msgspec.structs.fields(EngineConfig)}
    assert defaults["num_threads"] is num_cpus
