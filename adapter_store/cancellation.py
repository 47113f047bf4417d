"""A signal that a result is no longer wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancellation:
    """A one-way flag that one thread sets and other threads react to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_cancelled = False
        self._listeners: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Set the flag and call every listener, on this thread. A second call does nothing."""
        with self._lock:
            self.is_cancelled = True
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def when_cancelled(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, immediately if already cancelled. `listener` must be quick and must not raise."""
        with self._lock:
            if not self.is_cancelled:
                self._listeners.append(listener)
                return
        listener()
