from __future__ import annotations

import msgspec
import numpy as np
import pytest

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.parallel.worker_messages import PlaceAdapter, RunStep, ToWorker
from loramux.engine.sequences.batch import NO_ROWS, Batch, PooledRows, ScoredRows
from loramux.kernels.layout import AdapterLayout, RowCounts

STEP = Batch(
    tokens=np.array([5, 6, 7], np.int32),
    positions=np.array([0, 1, 9], np.int32),
    slots=np.array([-1, -1, 3], np.int32),
    cu_q=np.array([0, 2, 3], np.int32),
    seq_lens=np.array([2, 10], np.int32),
    blocks=np.array([4, 1], np.int32),
    block_starts=np.array([[0, 1], [0, 1]], np.int32),
    kv_slots=np.array([[64, 65, 25], [64, 65, 25]], np.int64),
    state_starts=np.zeros(0, np.int32),
    max_q=2,
    sample_rows=np.array([1, 2], np.int32),
    samples=(),
    scores=(ScoredRows(0, (6, 7), 2),),
    pooled=(PooledRows(2, 1, True, 4),),
)


def sent(message: ToWorker) -> ToWorker:
    return msgspec.msgpack.Decoder(ToWorker).decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("batch", [STEP, NO_ROWS], ids=["rows", "no rows"])
def test_a_step_arrives_without_its_sampling(batch: Batch) -> None:
    message = sent(RunStep.of(batch))
    assert isinstance(message, RunStep)
    for name in Batch.__struct_fields__:
        before, after = getattr(batch, name), getattr(message.batch, name)
        if isinstance(before, np.ndarray):
            assert (after.dtype, after.flags.writeable) == (before.dtype, True)
            np.testing.assert_array_equal(after, before)
        else:
            assert after == before


def test_an_adapter_arrives_with_its_layout() -> None:
    layout = AdapterLayout(
        ranks=np.array([[1, 0], [2, 3]], np.int32),
        offsets=np.zeros((2, 2, 3), np.int32),
        num_pages=2,
        outer_ranks=np.array([4], np.int32),
        has_affines=True,
        rows=RowCounts((3,), vocab_size=12),
    )
    payload = np.arange(24, dtype=np.uint8).reshape(2, 2, 6)
    packed = PackedAdapter("d", layout, np.ones((2, 2), np.float32), payload, np.full(1, 0.5, np.float32))
    message = sent(PlaceAdapter.of(7, [3, 1], packed))
    assert isinstance(message, PlaceAdapter)
    assert (message.slot, message.pages, message.digest) == (7, [3, 1], "d")
    assert (message.has_affines, message.rows) == (True, layout.rows)
    for array, expected in (
        (message.ranks, layout.ranks),
        (message.outer_ranks, layout.outer_ranks),
        (message.scales, packed.scales),
        (message.outer_scales, packed.outer_scales),
        (message.payload, payload),
    ):
        np.testing.assert_array_equal(array.array, expected)
