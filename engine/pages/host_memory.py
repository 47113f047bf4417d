"""Host memory for copies of the pool's pages."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from loramux.engine.device.accelerator import Accelerator, Fence
from loramux.engine.pages.pool_size import in_gib, num_pages_in
from loramux.engine.protocol.errors import ConfigNotUsable
from loramux.kernels.tables import PoolViews

PIECE_BYTES = 256 << 20
"""Largest piece of memory to allocate at once, in bytes, unless a page is larger. torch rounds pinned memory up to a
power of two.
"""

MEASURED_BYTES = 64 << 20
"""Number of bytes whose copies are timed at startup. Most caches of a CPU are smaller."""

NUM_ROUNDS = 3
"""Number of times that these copies are timed. The shortest time counts."""


class PinnedHostMemory:
    """Slots in pinned host memory. A slot has a page's bytes and, if K and V are int8, its scales, in each pool.

    Copies run in the order in which they and steps are submitted. On a CPU, they are finished when the call returns.
    """

    def __init__(self, pools: Sequence[PoolViews], accelerator: Accelerator, num_bytes: int) -> None:
        """Allocate as many whole slots as fit in `num_bytes`, and measure how long a copy takes. A page has the same
        number in all pools.

        Overwrites pages of the pool, which must not have owners yet. Raises ConfigNotUsable if no slot fits.
        """
        self.page_bytes = page_bytes = sum(views.geometry.pool_page_bytes for views in pools)
        self.num_slots = num_pages_in(num_bytes, page_bytes)
        self._accelerator = accelerator
        self._num_pages = pools[0].raw.shape[0]
        tensors = [part for views in pools for part in (views.raw, views.kv_scales) if part is not None]
        # uint8 [P, number of bytes in a page]
        self._pool = tuple(tensor.view(torch.uint8).view(self._num_pages, -1) for tensor in tensors)
        assert sum(part.shape[1] for part in self._pool) == page_bytes
        self._slots_per_piece = min(self.num_slots, max(1, PIECE_BYTES // page_bytes))
        counts = [self._slots_per_piece] * (self.num_slots // self._slots_per_piece)
        if rest := self.num_slots % self._slots_per_piece:
            counts.append(rest)
        try:
            self._pieces = [accelerator.host_buffer(count * page_bytes).view(count, page_bytes) for count in counts]
        except RuntimeError as error:
            raise ConfigNotUsable(
                f"{in_gib(num_bytes)} of host memory for keys and values cannot be allocated: lower kv_host_bytes"
            ) from error
        for piece in self._pieces:
            # Otherwise, the engine's thread would wait for new memory when a slot is first used.
            piece.zero_()
        self.load_s = self._measured_load_s()

    def save(self, page: int, slot: int) -> None:
        for part, copy in zip(self._pool, self._parts(slot), strict=True):
            self._accelerator.copy(copy, part[page])

    def load(self, slot: int, page: int) -> None:
        for part, copy in zip(self._pool, self._parts(slot), strict=True):
            self._accelerator.copy(part[page], copy)

    def content(self, slot: int) -> memoryview:
        """The bytes of a slot, also for another thread, which must first wait for a fence."""
        return self._row(slot).numpy().data

    def fence(self) -> Fence:
        """A fence that marks the end of all copies submitted so far."""
        return self._accelerator.fence()

    def _parts(self, slot: int) -> tuple[torch.Tensor, ...]:
        return torch.split(self._row(slot), [part.shape[1] for part in self._pool])

    def _row(self, slot: int) -> torch.Tensor:
        return self._pieces[slot // self._slots_per_piece][slot % self._slots_per_piece]

    def _measured_load_s(self) -> float:
        count = max(1, min(MEASURED_BYTES // self.page_bytes, self.num_slots, self._num_pages))
        rounds: list[float] = []
        for _ in range(1 + NUM_ROUNDS):
            started_s = time.perf_counter()
            for index in range(count):
                self.load(index, index)
            self._accelerator.fence().wait()
            rounds.append(time.perf_counter() - started_s)
        # The operating system provides memory when it is first written, so the first round is not the time of copies.
        # The time is not measured again, and a pause of this process in one round must not turn the tier off.
        return min(rounds[1:]) / count
