"""Interrupts a block of code that uses too much CPU time, such as a regular expression that backtracks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CpuTimeExceeded(Exception):
    """The block used more CPU time than allowed."""


@contextmanager
def limited_cpu_time(limit_s: float) -> Iterator[None]:
    """Raise CpuTimeExceeded inside the block once the process has used `limit_s` of CPU time in user mode.

    Python's regular expressions check for signals while they match. Only the main thread can use this limit.
    """
    previous = signal.signal(signal.SIGVTALRM, _exceed)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if previous is None else previous)


def _exceed(signal_number: int, frame: FrameType | None) -> None:
    raise CpuTimeExceeded
