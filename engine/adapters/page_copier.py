"""Copies adapters from host memory into pages, on a separate thread except for small copies on a CPU."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from loramux.adapter_store.tiers.tier_figures import TierFigures
from loramux.engine.adapters.adapter_load import AdapterLoad
from loramux.engine.device.accelerator import Accelerator, Fence
from loramux.engine.device.device_faults import reason_of

QUICK_COPY_BYTES = 512 << 10
"""Maximum number of bytes that the engine's own thread copies between two steps if the pool is in host memory. Copying
this many bytes takes 0.1 ms, about as long as waking another thread and waiting for it to release the interpreter lock.
"""


class Copier(Protocol):
    """Copies adapters into pages. Only the engine's thread calls it."""

    def copy(self, load: AdapterLoad) -> None:
        """Copy a staged adapter into its pages, either immediately or in the background."""

    def poll(self) -> list[tuple[AdapterLoad, str | None]]: ...

    def close(self) -> None:
        """Wait for the current copy, and drop all queued copies."""


class PageCopier:
    """Copies adapters, usually in parallel with steps. A copy waits for all steps that were submitted before it was
    requested.

    `pages` is the pool, one page per row. `wake` is called after each copy, usually from the copying thread, so that an
    idle engine polls.
    """

    def __init__(
        self, pages: torch.Tensor, accelerator: Accelerator, wake: Callable[[], None], figures: TierFigures
    ) -> None:
        self._pages = pages
        self._accelerator = accelerator
        self._wake = wake
        self._figures = figures
        # Copies have their own thread, because an adapter being copied holds pages and a slot, and must not wait behind
        # a load from a slow store.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-copier")
        self._copied: queue.SimpleQueue[tuple[AdapterLoad, str | None]] = queue.SimpleQueue()
        self._quick_bytes_left = QUICK_COPY_BYTES

    def copy(self, load: AdapterLoad) -> None:
        assert load.staged is not None
        # Steps already submitted may still read these pages on behalf of their previous owners.
        after = self._accelerator.fence()
        payload = torch.from_numpy(load.staged.packed.payload)
        if self._accelerator.device.type == "cpu" and payload.nbytes <= self._quick_bytes_left:
            self._quick_bytes_left -= payload.nbytes
            self._copy(load, payload, after)
        else:
            self._thread.submit(self._copy, load, payload, after)

    def poll(self) -> list[tuple[AdapterLoad, str | None]]:
        self._quick_bytes_left = QUICK_COPY_BYTES
        copied = []
        while True:
            try:
                copied.append(self._copied.get_nowait())
            except queue.Empty:
                return copied

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _copy(self, load: AdapterLoad, payload: torch.Tensor, after: Fence) -> None:
        failure = None
        try:
            with self._figures.noting(load.stages), self._figures.timed("pool", "copy", payload.nbytes):
                self._accelerator.upload(self._pages, load.pages, payload, after)
        except Exception as error:
            print(f"copying adapter {load.digest} into the page pool failed: {reason_of(error)}", file=sys.stderr)
            failure = f"copying failed: {type(error).__name__}"
        self._copied.put((load, failure))
        self._wake()
