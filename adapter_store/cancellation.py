"""A signal that a result is no longer wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancellation:
    """A one-way flag that one thread sets and other threads react to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> None:
        """Set the flag and call every listener, on this thread. A second call does nothing."""
        with self._lock:
            self._is_cancelled = True
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def when_cancelled(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, immediately if already cancelled. `listener` must be quick and must not raise."""
        with self._lock:
            if not self._is_cancelled:
                self._listeners.append(listener)
                return
        listener()
