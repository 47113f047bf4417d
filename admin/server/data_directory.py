"""The data directory of a server or a gateway, which only one process at a time can lock."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loramux.admin.errors import StartRefused


@dataclass(frozen=True, slots=True)
class DataDirectory:
    root: Path

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def disk_tier(self) -> Path:
        return self.root / "disk-tier"

    @property
    def quantized(self) -> Path:
        """Quantised weights of base models, reused after a restart."""
        return self.root / "quantized"

    @property
    def programs(self) -> Path:
        """Compiled GPU programs, reused after a restart."""
        return self.root / "programs"


@contextmanager
def open_data_directory(root: Path) -> Iterator[DataDirectory]:
    """Create and lock the directory. Raises StartRefused if it is not writable or another process has locked it."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (root / "lock").open("w")
    except OSError as error:
        raise StartRefused(
            f"the data directory {root} cannot be used: {error.strerror}; fix it or change --data-dir"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartRefused(
                f"another loramux process uses the data directory {root}: stop it or choose another --data-dir"
            ) from None
        directory = DataDirectory(root)
        for path in (directory.scratch, directory.disk_tier, directory.spool):
            path.mkdir(exist_ok=True, mode=0o700)
        yield directory
