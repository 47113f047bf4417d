"""Runs a command without some sandbox measures, as on a kernel or in a container that lacks them.

Usage: python lesser_kernel.py landlock,seccomp -m loramux.adapter_store.sandbox.confinement

The measures' system calls are refused. Seccomp filters stack and are inherited, so they have the same effect as a
container's profile.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

_LANDLOCK_CREATE_RULESET = 444
_UNSHARE = {"x86_64": 272, "aarch64": 97}
_PRCTL = {"x86_64": 157, "aarch64": 167}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NR, _FIRST_ARGUMENT = 0, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def take_away(measures: set[str]) -> None:
    machine = platform.machine()
    instructions = [(_LOAD_WORD, 0, 0, _NR)]
    if "landlock" in measures:
        refusal = (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)
        instructions += [(_JUMP_IF_EQUAL, 0, 1, _LANDLOCK_CREATE_RULESET), refusal]
    if "network namespace" in measures:
        instructions += [(_JUMP_IF_EQUAL, 0, 1, _UNSHARE[machine]), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    if "seccomp" in measures:
        instructions += [
            (_JUMP_IF_EQUAL, 0, 3, _PRCTL[machine]),
            (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT),
            (_JUMP_IF_EQUAL, 0, 1, _PR_SET_SECCOMP),
            (_RETURN, 0, 0, _REFUSE | errno.EINVAL),
        ]
    instructions.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in instructions))
    program = _Program(len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0, os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    take_away(set(sys.argv[1].split(",")))
    os.execv(sys.executable, [sys.executable, "-P", *sys.argv[2:]])
