"""Irrevocably denies this process access to the network, other processes and all files that it does not need."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from loramux.adapter_store.sandbox.landlock import restrict_files
from loramux.adapter_store.sandbox.seccomp import refuse_calls

NETWORK, FILES, CALLS, PRIVILEGES = "network namespace", "landlock", "seccomp", "no_new_privs"
MEASURES = (PRIVILEGES, NETWORK, FILES, CALLS)
"""Names of the measures that `confine` takes. NETWORK or CALLS alone is enough to deny the network."""
ESSENTIAL = (PRIVILEGES, FILES, CALLS)
"""Measures that together deny access to files, other processes and the network, even without NETWORK."""
REQUIRED = "--sandbox-required"
"""Argument of a program that calls `confine` with `required=ESSENTIAL`."""

_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522
_MAX_OPEN_FILES = 32


def limit_resources(memory_bytes: int, file_bytes: int, cpu_s: int) -> None:
    """Limit the address space, the size of each written file, the CPU time and the number of open files, and disable
    core files.
    """
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
    ):
        resource.setrlimit(kind, (value, value))


def confine(writable: Iterable[Path], required: Collection[str] = ()) -> list[str]:
    """Drop all privileges, and deny access to the network, other processes and files.

    The directories `writable` and, for reading, Python's own files remain accessible.

    The process is also killed when the thread that started it dies. Returns the names of the measures that this machine
    lacks. Kernels and containers differ in which measures they allow. Exits if the machine lacks a `required` measure.
    """
    missing = _confine(writable)
    if lacking := [name for name in required if name in missing]:
        sys.exit(f"this machine has no {' and no '.join(lacking)}, which the sandbox is configured to require")
    return missing


def _confine(writable: Iterable[Path]) -> list[str]:
    if sys.platform != "linux":
        return list(MEASURES)
    end_with_parent()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # An ordinary user can unshare the network only together with a new user namespace.
    has_network = libc.unshare(_NEW_NETWORK) != 0 and libc.unshare(_NEW_USER | _NEW_NETWORK) != 0
    taken = {
        NETWORK: not has_network,
        PRIVILEGES: libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0,
    }
    _drop_capabilities(libc)
    taken[FILES] = restrict_files(libc, _code_directories(), writable)
    taken[CALLS] = refuse_calls(libc)
    return [name for name in MEASURES if not taken[name]]


def end_with_parent() -> None:
    """Have this process killed when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide_memory() -> None:
    """Deny other processes of the same user access to this process's memory, environment and open files, and disable
    core files. Processes that this one starts are not hidden. See PR_SET_DUMPABLE in prctl(2).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop all capabilities. This process has some if root runs the server, or if it is in a new user namespace."""
    libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24))


def _code_directories() -> list[Path]:
    """Return the real paths of the directories from which Python may still import modules."""
    places = [sys.prefix, sys.base_prefix, *(path for path in sys.path if path)]
    return [Path(os.path.realpath(place)) for place in dict.fromkeys(places) if os.path.isdir(place)]


if __name__ == "__main__":
    # Confinement is irrevocable, so a separate process determines which measures the machine lacks.
    json.dump(confine(()), sys.stdout)
