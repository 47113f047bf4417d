"""The signals that stop the process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StopSignals:
    """Ctrl-C or SIGTERM requests a drain. A second signal cuts the drain short."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.hurry = asyncio.Event()

    def ask(self) -> None:
        if self.drain.is_set():
            self.hurry.set()
        self.drain.set()

    @contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
