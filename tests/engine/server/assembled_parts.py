from __future__ import annotations

import os
import select
from collections.abc import Callable

from loramux.engine.protocol.messages import EngineReady

READY = EngineReady(max_model_len=512, num_pages=64, page_tokens=16, device="cpu", dtype="float32")


class Stager:
    """Completes all pending looks when the test writes to its pipe, then replaces the pipe."""

    def __init__(self) -> None:
        self.looks: list[Callable[[], None]] = []
        self._read, self.write = os.pipe()
        self.num_pipes = 1

    def fileno(self) -> int:
        return self._read

    def look(self, then: Callable[[], None]) -> None:
        self.looks.append(then)

    def attend(self) -> None:
        if not select.select([self._read], [], [], 0)[0]:
            return
        self.close()
        self._read, self.write = os.pipe()
        self.num_pipes += 1
        while self.looks:
            self.looks.pop()()

    def close(self) -> None:
        os.close(self._read)
        os.close(self.write)
