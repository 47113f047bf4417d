from __future__ import annotations

import threading
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    waiting = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        waiting.wait(0.02)
    raise AssertionError("the condition was not met in time")
