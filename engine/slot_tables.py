"""The adapter tables: allocated once, at addresses that never change, and written slot by slot between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.accelerator import Accelerator
from loramux.kernels.layout import MAX_RANK, AdapterLayout, LinearShape, PageGeometry, adapter_layout
from loramux.kernels.tables import AdapterTables


class SlotTables:
    """Tables for `num_slots` adapters, wide enough for one of the highest rank on every module.

    `device` is what kernels read. On a GPU each slot is staged in host memory and copied in the order of the steps. A
    slot's stage may be written again although its copy has not been waited for: between two writes of one slot lies a
    whole load of an adapter, which begins after all steps submitted before it.
    """

    def __init__(
        self, geometry: PageGeometry, modules: Sequence[LinearShape], num_slots: int, accelerator: Accelerator
    ) -> None:
        shape = (geometry.num_layers, len(modules))
        max_pages = adapter_layout(geometry, modules, np.full(shape, MAX_RANK, np.int32)).num_pages

        def zeros(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return (
                accelerator.host_buffer(4 * num_slots * int(np.prod(sizes))).view(dtype).view(num_slots, *sizes).zero_()
            )

        self._host = AdapterTables(
            page_table=zeros(torch.int32, max_pages),
            off=zeros(torch.int32, *shape, 2),
            rank=zeros(torch.int32, *shape),
            scale=zeros(torch.float32, *shape),
        )
        self.device = self._host
        if accelerator.device.type != "cpu":
            self.device = AdapterTables(*(table.to(accelerator.device) for table in self._of(self._host)))
        self._max_ranks = np.zeros(num_slots, np.int32)

    def write(self, slot: int, pages: list[int], layout: AdapterLayout, scales: npt.NDArray[np.float32]) -> None:
        """Describe the adapter that lies in `pages`; `scales` float32 `[L, M]`."""
        self._host.page_table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._host.off[slot] = torch.from_numpy(layout.offsets)
        self._host.rank[slot] = torch.from_numpy(layout.ranks)
        self._host.scale[slot] = torch.from_numpy(scales)
        self._max_ranks[slot] = layout.ranks.max(initial=0)
        if self.device is not self._host:
            for staged, table in zip(self._of(self._host), self._of(self.device), strict=True):
                table[slot].copy_(staged[slot], non_blocking=True)

    def max_rank(self, slots: npt.NDArray[np.int32]) -> int:
        """The highest rank among the adapters in `slots`, where -1 is none; 0 without any."""
        used = slots[slots >= 0]
        return int(self._max_ranks[used].max(initial=0))

    @staticmethod
    def _of(tables: AdapterTables) -> tuple[torch.Tensor, ...]:
        return tables.page_table, tables.off, tables.rank, tables.scale
