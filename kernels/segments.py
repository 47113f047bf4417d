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
    order = np.argsort(slots, kind="stable")
    rows = order[np.searchsorted(slots, 0, sorter=order) :].astype(np.int32)
    grouped = slots[rows]
    # A segment starts where the slot changes, and again after every `max_rows` rows of one slot.
    is_first = np.ones(rows.shape[0], np.bool_)
    is_first[1:] = grouped[1:] != grouped[:-1]
    if max_rows is not None:
        firsts = np.flatnonzero(is_first)
        position = np.arange(rows.shape[0])
        position -= np.repeat(firsts, np.diff(firsts, append=rows.shape[0]))
        is_first = position % max_rows == 0
    starts = np.flatnonzero(is_first).astype(np.int32)
    return Segments(
        rows=torch.from_numpy(rows),
        starts=torch.from_numpy(np.append(starts, np.int32(rows.shape[0]))),
        slots=torch.from_numpy(grouped[starts].astype(np.int32, copy=False)),
    )
