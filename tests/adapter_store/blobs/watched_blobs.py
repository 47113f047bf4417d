from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import BlobStoreUnavailable
from tests.adapter_store.memory_blobs import MemoryBlobStore


class WatchedBlobStore(MemoryBlobStore):
    """Counts reads. A test can delay its answers or take it down."""

    def __init__(self) -> None:
        super().__init__()
        self.num_gets: Counter[str] = Counter()
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_down = False

    def get(self, key: str, destination: Path, **limits: Any) -> None:
        self.num_gets[key.split("/")[0]] += 1
        self.asked.set()
        self.may_answer.wait(60)
        if self.is_down:
            raise BlobStoreUnavailable("the store is down")
        super().get(key, destination, **limits)

    def damage(self, key: str) -> None:
        data = bytearray(self.read_bytes(key))
        data[-1] ^= 1
        self.delete(key)
        self.put(key, bytes(data))
