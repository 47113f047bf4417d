"""The words that change with every step of a program: where the step's rows, pages and adapters are described."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from loramux.kernels.cpu.instructions.arrays import array
from loramux.kernels.tables import AttentionBatch, Segments

CU_Q, SEQ_LENS, PAGES, PAGE_STARTS, KV_SLOTS = range(5)
"""Words of one group of layers: addresses of the fields of its `AttentionBatch`."""

GROUP_WORDS = 5
MAX_GROUPS = 2
"""`CacheLayout` has at most two groups."""

SEGMENT_ROWS, SEGMENT_STARTS, SEGMENT_SLOTS, NUM_SEGMENTS, NUM_SEGMENT_ROWS = range(
    GROUP_WORDS * MAX_GROUPS, GROUP_WORDS * MAX_GROUPS + 5
)
"""Words of the step's adapters: addresses of the fields of `Segments`, and numbers of segments and of their rows."""

STEP_WORDS = GROUP_WORDS * MAX_GROUPS + 5


def step_words(num_rows: int, attention: tuple[AttentionBatch, ...], segments: Segments) -> npt.NDArray[np.int64]:
    """The words of one step of `num_rows` rows, int64 `[STEP_WORDS]`. They point to the memory of the tensors.

    A program's operations cannot check what they read, so a step of another size is refused here.
    """
    words = [0] * STEP_WORDS
    assert len(attention) <= MAX_GROUPS
    for group, batch in enumerate(attention):
        lengths = batch.cu_q.shape[0] - 1, batch.seq_lens.shape[0], batch.page_starts.shape[0], batch.kv_slots.shape[0]
        assert lengths == (num_rows,) * 4, f"the program is for {num_rows} rows, not {lengths}"
        fields = (batch.cu_q, batch.seq_lens, batch.pages, batch.page_starts)
        words[GROUP_WORDS * group : GROUP_WORDS * (group + 1)] = [
            *(_address(tensor, torch.int32) for tensor in fields),
            _address(batch.kv_slots, torch.int64),
        ]
    if segments.num_segments:
        assert segments.starts.shape[0] == segments.num_segments + 1
        rows = array(segments.rows, torch.int32)
        assert rows.max() < num_rows, f"the program is for {num_rows} rows, but an adapter has row {rows.max()}"
        words[SEGMENT_ROWS] = segments.rows.data_ptr()
        words[SEGMENT_STARTS] = _address(segments.starts, torch.int32)
        words[SEGMENT_SLOTS] = _address(segments.slots, torch.int32)
        words[NUM_SEGMENTS], words[NUM_SEGMENT_ROWS] = segments.num_segments, segments.rows.shape[0]
    return np.array(words, np.int64)


def _address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    assert tensor.dtype is dtype, f"expected {dtype}, got {tensor.dtype}"
    assert tensor.is_contiguous()
    return tensor.data_ptr()
