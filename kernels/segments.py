"""Group the rows of a batch by adapter slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from loramux.kernels.tables import Segments


def build_segments(slots: npt.NDArray[np.int32], max_rows: int | None) -> Segments:
    """Group rows by adapter slot, smallest slot first, rows in their order.

    `slots` int32 `[T]` is the adapter slot of each row, -1 for a row of the base, which is not listed. A segment has
    at most `max_rows` rows; None sets no bound.
    """
    order = slots.argsort(kind="stable")
    num_base = int(slots[order].searchsorted(0))
    rows = order[num_base:].astype(np.int32)
    grouped = slots[rows]
    ends = [*((grouped[1:] != grouped[:-1]).nonzero()[0] + 1).tolist(), rows.shape[0]]
    starts: list[int] = []
    begin = 0
    for end in ends:
        starts.extend(range(begin, end, max_rows or max(1, end - begin)))
        begin = end
    return Segments(
        rows=torch.from_numpy(rows),
        starts=torch.tensor([*starts, rows.shape[0]], dtype=torch.int32),
        slots=torch.from_numpy(grouped[starts]) if starts else torch.empty(0, dtype=torch.int32),
    )
