"""What the processes of a running server take: memory, descriptors and threads."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

Usage = Mapping[str, float]


class Sampler:
    """Calls `read` every `interval_s` seconds in a thread, during a `with` block, which raises what `read` raises."""

    def __init__(self, read: Callable[[], Usage], interval_s: float) -> None:
        self.series: dict[str, list[float]] = {}
        """The samples by name. What a sample lacked counts as 0."""
        self._read = read
        self._interval_s = interval_s
        self._num_samples = 0
        self._failure: Exception | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._interval_s):
                self.add(self._read())
        except Exception as failure:
            self._failure = failure

    def add(self, sample: Usage) -> None:
        for name in {*self.series, *sample}:
            self.series.setdefault(name, [0.0] * self._num_samples).append(sample.get(name, 0.0))
        self._num_samples += 1


def process_usage(pid: int) -> Usage:
    """Sums over the processes of each role, for a process and its descendants: megabytes, descriptors, and threads.

    A page that several processes share counts for each of them in part (PSS), so that forks do not count twice.
    """
    usage: defaultdict[str, float] = defaultdict(float)
    for one, role in processes_of(pid).items():
        # A process can end meanwhile.
        with contextlib.suppress(OSError, StopIteration):
            own = Path(f"/proc/{one}")
            lines = (own / "smaps_rollup").read_text().splitlines()
            pss_kb = float(next(line for line in lines if line.startswith("Pss:")).split()[1])
            usage[f"{role}: memory, MB"] += pss_kb / 1024
            usage[f"{role}: descriptors"] += len(list((own / "fd").iterdir()))
            usage[f"{role}: threads"] += len(list((own / "task").iterdir()))
    return usage


def processes_of(pid: int) -> Mapping[int, str]:
    """The roles of a process and of its descendants, by process id: `server`, or the last part of a module's name."""
    found, waiting = {pid: "server"}, [pid]
    while waiting:
        for file in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for child in map(int, file.read_text().split()):
                    found[child] = _role(child)
                    waiting.append(child)
    return found


def _role(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words[:-1] else Path(words[0]).name
