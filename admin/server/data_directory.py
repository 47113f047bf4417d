"""The data directory of a server or a gateway, which only one process at a time can lock."""

from __future__ import annotations

import fcntl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loramux.admin.errors import StartRefused

OWN_NAMES = frozenset(
    (
        *(
            "blobs",
            "cluster",
            "disk-tier",
            "gguf",
            "lock",
            "lost+found",
            "models",
            "programs",
            "quantized",
            "run",
            "scratch",
        ),
        *("spool", "traces.jsonl"),
    )
)
"""Entries of a data directory, besides the files of the embedded database."""
DATABASE_NAME = "loramux.db"


@dataclass(frozen=True, slots=True)
class DataDirectory:
    root: Path

    @property
    def cluster(self) -> Path:
        """The files of the cluster that `loramux cluster up` has started."""
        return self.root / "cluster"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    @property
    def run(self) -> Path:
        return self.root / "run"

    def engine_run(self, name: str) -> Path:
        """The directory of the socket of one of several engines."""
        return self.run / name

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
    def gguf(self) -> Path:
        """Descriptions of base models in GGUF files."""
        return self.root / "gguf"

    @property
    def programs(self) -> Path:
        """Compiled GPU programs, reused after a restart."""
        return self.root / "programs"


def make_private(root: Path) -> None:
    """Create a data directory that only its owner can access, or take the access of others to an existing one away.

    The mode of a directory that also has other content stays, because it may be a directory of the system, such as
    /srv. `loramux doctor` warns of its mode. Raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    mode = stat.S_IMODE(root.stat().st_mode)
    is_own = all(entry.name in OWN_NAMES or entry.name.startswith(DATABASE_NAME) for entry in root.iterdir())
    if mode & 0o077 and is_own:
        # Only the directory's owner can change the mode.
        with suppress(PermissionError):
            root.chmod(mode & 0o700)


@contextmanager
def open_data_directory(root: Path) -> Iterator[DataDirectory]:
    """Create and lock the directory, and close it to other users.

    Raises StartRefused if it is not writable or another process has locked it.
    """
    try:
        make_private(root)
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
