"""The rows of a batch, grouped by adapter slot, and a bound on the number of segments."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from loramux.kernels.layout import MAX_RANK
from loramux.kernels.routing import Routing
from loramux.kernels.tables import Segments

SEGMENT_ROWS = 16
"""Maximum number of rows per segment on a GPU, except in steps with many rows per sequence: the smallest tile that
tensor cores support.
"""

LARGE_SEGMENT_ROWS = 64
"""Maximum number of rows per segment on a GPU in steps with many rows per sequence. Each segment reads its A and B
once.
"""


def max_segments(num_tokens: int, num_sequences: int, segment_rows: int = SEGMENT_ROWS) -> int:
    """The maximum number of segments of up to `segment_rows` rows in a batch: the grid size of a captured graph.

    A batch has no more adapters than sequences. Each adapter has at most one partial segment, and no segment is empty.
    """
    return min(num_tokens, num_tokens // segment_rows + num_sequences)


def group_rows(
    slots: npt.NDArray[np.int32], max_rows: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Group rows by adapter slot, in ascending slot and row order; return `rows`, `starts` and `slots` of `Segments`.

    `slots` int32 `[T]` is the adapter slot of each row, or -1 for a row without an adapter, which is not listed. A
    segment has at most `max_rows` rows.
    """
    order = slots.argsort(kind="stable")
    rows = order[slots[order].searchsorted(0) :].astype(np.int32)
    grouped = slots[rows]
    index = np.arange(rows.shape[0], dtype=np.int32)
    is_first = np.ones(rows.shape[0], np.bool_)
    is_first[1:] = grouped[1:] != grouped[:-1]
    # The index of each row among its slot's rows.
    place = index - np.maximum.accumulate(np.where(is_first, index, 0))
    starts = index[place % max_rows == 0]
    return rows, np.append(starts, np.int32(rows.shape[0])), grouped[starts]


def build_pair_segments(routing: Routing, slots: torch.Tensor, max_rows: int, max_rank: int = MAX_RANK) -> Segments:
    """Group the pairs of a row and an expert by adapter and expert, on the CPU.

    Rows without an adapter are left out. `slots` is as in `group_rows`.
    """
    of_pair = routing.experts.numpy()  # [T, top_k]
    num_experts = routing.starts.shape[0] - 1
    slot_of_row = slots.numpy()[:, None]
    keys = np.where(slot_of_row >= 0, slot_of_row * num_experts + of_pair, np.int32(-1)).reshape(-1)
    rows, starts, found = group_rows(keys, max_rows)
    arrays = rows, starts, found // np.int32(num_experts), found % np.int32(num_experts)
    pairs, pair_starts, segment_slots, experts = (torch.from_numpy(one) for one in arrays)
    return Segments(pairs, pair_starts, segment_slots, max_rank, max_rows, experts)


def build_segments(slots: npt.NDArray[np.int32], max_rows: int, max_rank: int = MAX_RANK) -> Segments:
    """Build a batch's segments on the CPU from the arguments of `group_rows` and the maximum rank of the listed
    adapters.
    """
    rows, starts, segment_slots = group_rows(slots, max_rows)
    return Segments(
        torch.from_numpy(rows), torch.from_numpy(starts), torch.from_numpy(segment_slots), max_rank, max_rows
    )
