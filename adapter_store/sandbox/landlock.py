"""Landlock: the kernel lets this process access the given directories and no other files. See landlock(7)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1

_WRITE_FILE, _READ_FILE, _READ_DIR, _MAKE_REGULAR = 1 << 1, 1 << 2, 1 << 3, 1 << 8
_TRUNCATE = 1 << 14

_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file access rights in each version of the interface; version 5 and later have 16."""

_BOTH_TCP_RIGHTS = 0b11
_BOTH_SCOPES = 0b11


def restrict_files(libc: ctypes.CDLL, readable: Iterable[Path], writable: Iterable[Path]) -> bool:
    """From now on, allow reading only under `readable` and `writable`, and writing and creating only under `writable`.

    Also refuse TCP, abstract sockets and signals to other processes, if the kernel supports that. If the kernel has no
    Landlock, return False without restricting anything. Needs no_new_privs.
    """
    version = libc.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
    if version < 1:
        return False
    handled = (1 << _NUM_FILE_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("=Q", handled)
    attributes += struct.pack("=Q", _BOTH_TCP_RIGHTS) if version >= 4 else b""
    attributes += struct.pack("=Q", _BOTH_SCOPES) if version >= 6 else b""
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        read = _READ_FILE | _READ_DIR
        write = read | ((_WRITE_FILE | _MAKE_REGULAR | _TRUNCATE) & handled)
        allowed = [(path, read) for path in readable] + [(path, write) for path in writable]
        return all(_allow(libc, ruleset, path, rights) for path, rights in allowed) and (
            libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
        )
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, directory: Path, rights: int) -> bool:
    try:
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        # A directory that does not exist needs no rule.
        return True
    try:
        rule = struct.pack("=Qi", rights, descriptor)
        return bool(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0) == 0)
    finally:
        os.close(descriptor)
