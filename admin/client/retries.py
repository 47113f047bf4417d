"""Repeats calls that only read, while the server restarts or is busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from loramux.admin.client.client import AdminError, ServerUnreachable

RETRY_FOR_S = 300.0
"""How long a failing read is repeated, in seconds. The restart of a server can take minutes."""
PAUSE_S = 2.0
"""Pause before a read is repeated, in seconds, unless the server asks for a longer one."""

ResultT = TypeVar("ResultT")


def is_temporary(error: AdminError | ServerUnreachable) -> bool:
    """Return True if the same call can succeed later."""
    return isinstance(error, ServerUnreachable) or error.status == 429 or error.status >= 500


def retry_read(read: Callable[[], ResultT], retry_for_s: float = RETRY_FOR_S) -> ResultT:
    """Call `read`, and repeat it for up to `retry_for_s` seconds after its first error while its errors are temporary.

    Raises AdminError or ServerUnreachable, the last error of `read`.
    """
    deadline_s: float | None = None
    while True:
        try:
            return read()
        except (AdminError, ServerUnreachable) as error:
            pause_s = PAUSE_S
            if isinstance(error, AdminError) and error.retry_after_s is not None:
                pause_s = max(PAUSE_S, error.retry_after_s)
            if deadline_s is None:
                deadline_s = time.monotonic() + retry_for_s
            if not is_temporary(error) or time.monotonic() + pause_s > deadline_s:
                raise
        time.sleep(pause_s)
