"""A filter with which a process irrevocably gives up system calls that it does not need.

The filter is a classic BPF program over `struct seccomp_data {int nr; u32 arch; ...}`: see seccomp(2). The filter lists
refused calls rather than allowed ones, because different versions of Python, numpy and the C library make different
calls. A refused call fails with EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

# System call numbers on x86-64 and 64-bit ARM; None if the architecture lacks the call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # The network, and sockets of other processes.
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # New processes and threads, and other programs.
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    # Other processes.
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    # Modes, owners, attributes and times of files, which Landlock does not cover.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    # Links, which could make the server open a different file from the one it expects.
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    # Before version 3, Landlock does not cover truncation. An open file can still be truncated.
    "truncate": (76, 45),
    # Memory that does not count toward the address space limit.
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    # Rarely used kernel features.
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "io_uring_enter": (426, 426),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "request_key": (249, 218),
    "setns": (308, 268),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NR, _ARCH = 0, 4
_ALLOW, _KILL_PROCESS, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_X32_CALLS = 0x40000000
"""First number of the x32 calls. They repeat the x86-64 calls for programs with 32-bit pointers."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def refuse_calls(libc: ctypes.CDLL) -> bool:
    """Install the filter, or return False if the machine or its kernel does not support it. Needs no_new_privs."""
    if platform.machine() not in _MACHINES:
        return False
    column, arch = _MACHINES[platform.machine()]
    instructions = [
        (_LOAD_WORD, 0, 0, _ARCH),
        (_JUMP_IF_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD_WORD, 0, 0, _NR),
        (_JUMP_IF_AT_LEAST, 0, 1, _X32_CALLS),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            instructions += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    instructions.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in instructions))
    program = _Program(len(instructions), ctypes.addressof(code))
    return bool(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) == 0)
