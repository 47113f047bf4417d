"""Looks at processes through /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from loramux.adapter_store.sandbox.fork_server import ForkServer


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def forks_of(server: ForkServer, name: str) -> list[int]:
    found = []
    with suppress(OSError):
        for child in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == name:
                found.append(int(child))
    return found
