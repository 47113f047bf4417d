"""A word to whoever waits that the result is no longer wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancellation:
    """Given by one thread, heard by others, once and for good. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> None:
        """Tell every listener, on this thread; a second call changes nothing."""
        with self._lock:
            self._is_cancelled = True
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def when_cancelled(self, listener: Callable[[], None]) -> None:
        """Have `listener` called once, now if it was cancelled before; it must be quick and raise nothing."""
        with self._lock:
            if not self._is_cancelled:
                self._listeners.append(listener)
                return
        listener()
