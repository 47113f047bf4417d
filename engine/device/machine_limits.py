"""The processors and the memory that this process may use: the machine's, within the limits of its cgroups.

A container's limits are limits of its cgroup (Linux's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1). They
change neither the processors that a process is bound to nor `/proc/meminfo`. This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def num_cpus(root: Path = ROOT) -> int:
    """Return how many processors' worth of time this process gets, at least 1: those that it is bound to, or the whole
    part of the smallest quota of its cgroups.
    """
    quotas = [_cpu_quota(folder) for folder in _cgroups(root, "cpu")]
    return min([len(os.sched_getaffinity(0)), *(max(1, int(quota)) for quota in quotas if quota is not None)])


def free_memory(root: Path = ROOT) -> int:
    """Return how many bytes of memory are available to this process: Linux's `MemAvailable`, or what the smallest limit
    of its cgroups leaves. As in `MemAvailable`, cached files count as available.
    """
    available = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    left = [_memory_left(folder) for folder in _cgroups(root, "memory")]
    return max(0, min([available, *(num_bytes for num_bytes in left if num_bytes is not None)]))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those that contain it, in version 2 and in version 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / (controller if controllers else "")
        # In a container, the path can be the host's, and the container's own cgroup is at the root.
        own = PurePosixPath(path.lstrip("/"))
        for part in (own, *own.parents):
            yield mounted / part


def _cpu_quota(folder: Path) -> float | None:
    """The processor time per time, or None if there is no quota."""
    words = _read(folder / "cpu.max").split()
    words = words or [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not (words[0].isdecimal() and words[1].isdecimal()):
        return None
    return int(words[0]) / int(words[1])


def _memory_left(folder: Path) -> int | None:
    """The bytes that the limit leaves, or None if there is no limit."""
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    if not (limit.isdecimal() and used.isdecimal()):
        return None
    lines = map(str.split, _read(folder / "memory.stat").splitlines())
    counts = {words[0]: words[1] for words in lines if len(words) == 2}
    # Version 1 has counts of the cgroup alone under these names, and those of the whole subtree with a prefix.
    prefix = "total_" if "total_inactive_file" in counts else ""
    cached = sum(int(counts.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return int(limit) - int(used) + cached


def _read(path: Path) -> str:
    """Return the stripped content of a file, or an empty text if there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
