from __future__ import annotations

import numpy as np
import pytest
import torch

from loramux.kernels.segments import SEGMENT_ROWS, build_segments, max_segments


@pytest.mark.parametrize(
    ("slots", "max_rows", "rows", "starts", "segment_slots"),
    [
        pytest.param([], 4, [], [0], [], id="empty"),
        pytest.param([-1, -1], 4, [], [0], [], id="all-base"),
        pytest.param([5], 1, [0], [0, 1], [5], id="one-row"),
        pytest.param([2, -1, 0, 2], 9, [2, 0, 3], [0, 1, 3], [0, 2], id="shuffled"),
        pytest.param([1] * 5, 2, [0, 1, 2, 3, 4], [0, 2, 4, 5], [1, 1, 1], id="split"),
        pytest.param([0, 1, 0, 1, 0], 2, [0, 2, 4, 1, 3], [0, 2, 3, 5], [0, 0, 1], id="split-within-slots"),
    ],
)
def test_rows_are_grouped_by_adapter_in_order(
    slots: list[int], max_rows: int, rows: list[int], starts: list[int], segment_slots: list[int]
) -> None:
    segments = build_segments(np.array(slots, np.int32), max_rows)
    assert segments.rows.tolist() == rows
    assert segments.starts.tolist() == starts
    assert segments.slots.tolist() == segment_slots
    assert segments.num_segments == len(segment_slots)
    assert {part.dtype for part in (segments.rows, segments.starts, segments.slots)} == {torch.int32}


@pytest.mark.parametrize("max_rows", [1, 7, 64, 1000], ids=lambda n: f"max-{n}")
def test_covers_every_adapter_row_once(max_rows: int) -> None:
    slots = np.random.default_rng(0).integers(-1, 9, 500).astype(np.int32)
    segments = build_segments(slots, max_rows)
    assert sorted(segments.rows.tolist()) == np.flatnonzero(slots >= 0).tolist()
    for i, slot in enumerate(segments.slots.tolist()):
        rows = segments.rows[segments.starts[i] : segments.starts[i + 1]].tolist()
        assert rows == sorted(rows)
        assert 0 < len(rows) <= max_rows
        assert set(slots[rows]) == {slot}


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "expected"),
    [(1, 1, 1), (64, 64, 64), (64, 1, 5), (512, 10, 42), (15, 1, 1), (16, 0, 1), (40, 3, 5)],
    ids=lambda n: str(n),
)
def test_segment_count_is_within_the_bound(num_tokens: int, num_sequences: int, expected: int) -> None:
    assert max_segments(num_tokens, num_sequences) == expected
    rng = np.random.default_rng(num_tokens)
    for _ in range(20 if num_sequences else 0):
        slots = rng.integers(-1, 5, num_sequences).astype(np.int32)[rng.integers(0, num_sequences, num_tokens)]
        assert build_segments(slots, SEGMENT_ROWS).num_segments <= max_segments(num_tokens, num_sequences)
