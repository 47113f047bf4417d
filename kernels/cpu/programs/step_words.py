"""The words that change with every step of a program: where the step's rows, pages and adapters are described."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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


def step_words(attention: tuple[AttentionBatch, ...], segments: Segments) -> npt.NDArray[np.int64]:
    """The words of one step, int64 `[STEP_WORDS]`. They point to the memory of the tensors."""
    words = [0] * STEP_WORDS
    for group, batch in enumerate(attention):
        fields = (batch.cu_q, batch.seq_lens, batch.pages, batch.page_starts, batch.kv_slots)
        words[GROUP_WORDS * group : GROUP_WORDS * (group + 1)] = [tensor.data_ptr() for tensor in fields]
    if segments.num_segments:
        words[SEGMENT_ROWS] = segments.rows.data_ptr()
        words[SEGMENT_STARTS] = segments.starts.data_ptr()
        words[SEGMENT_SLOTS] = segments.slots.data_ptr()
        words[NUM_SEGMENTS], words[NUM_SEGMENT_ROWS] = segments.num_segments, segments.rows.shape[0]
    return np.array(words, np.int64)
