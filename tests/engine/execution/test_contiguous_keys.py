from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.engine.execution.contiguous_keys import contiguous_keys, padding_keys
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.sequences.batch import Batch, ScheduledSequence, build_batch
from loramux.engine.sequences.cache_groups import CacheGroup
from loramux.engine.sequences.sequence import PageTable, Sequence, block_list
from loramux.kernels.tables import AttentionBatch, ContiguousKeys
from tests.kernels.sequences import with_contiguous_keys

WHOLE, WINDOWED = CacheGroup((0,), None), CacheGroup((1,), 20)
MANY = 1 << 20


def a_batch(chunks: list[tuple[int, int]], num_groups: int = 2) -> Batch:
    """A batch of sequences given as `(computed, new tokens)`, whose groups have different blocks."""
    rng = np.random.default_rng(0)
    scheduled = []
    for index, (num_computed, num_tokens) in enumerate(chunks):
        end = num_computed + num_tokens
        tables = [PageTable(block_list(rng.integers(0, 1000, -(-end // 16)).tolist())) for _ in range(num_groups)]
        add = Add(sequence_id=str(index), prompt=(0,) * end, max_tokens=1, sampling=SamplingParams())
        sequence = Sequence(add=add, owner=b"", arrival=0, seed=0, slot=-1, num_computed=num_computed, tables=tables)
        scheduled.append(ScheduledSequence(sequence, num_tokens))
    return build_batch(scheduled, 16)


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def attention_batch(batch: Batch, group: int) -> AttentionBatch:
    return AttentionBatch(
        cu_q=torch.from_numpy(batch.cu_q),
        seq_lens=torch.from_numpy(batch.seq_lens),
        pages=torch.from_numpy(batch.blocks),
        page_starts=torch.from_numpy(batch.block_starts[group]),
        kv_slots=torch.from_numpy(batch.kv_slots[group]),
        max_q=batch.max_q,
    )


def assert_same(found: ContiguousKeys | None, expected: ContiguousKeys | None) -> None:
    assert found is not None
    assert expected is not None
    for field in fields(ContiguousKeys):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(b, torch.Tensor):
            assert a.dtype is torch.int32
            assert a.tolist() == b.tolist()
        elif isinstance(b, float):
            assert a == pytest.approx(b)
        else:
            assert a == b


@given(st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 2, 16, 17, 40])), min_size=1, max_size=9))
@settings(max_examples=100, deadline=None)
def test_keys_match_a_loop_over_sequences(chunks: list[tuple[int, int]]) -> None:
    batch = a_batch(chunks)
    found = contiguous_keys(batch, (WHOLE, WINDOWED), MANY, same)
    prefixes = [num_computed for num_computed, num_tokens in chunks if num_tokens > 1]
    if not prefixes:
        assert found == [None, None]
        return
    gathers = any(prefixes)
    expected = with_contiguous_keys(attention_batch(batch, 0), gathers=gathers, poison=-1).contiguous
    assert_same(found[0], expected if gathers else expected and with_fresh_mean(expected))
    # Pages before a window are not listed.
    assert (found[1] is None) == gathers


def with_fresh_mean(keys: ContiguousKeys) -> ContiguousKeys:
    """Without pages, the mean is not computed, because nothing is gathered."""
    return ContiguousKeys(**{field.name: getattr(keys, field.name) for field in fields(keys)} | {"rows_per_key": 0.0})


def test_contexts_of_too_many_pages_are_not_gathered() -> None:
    batch = a_batch([(17, 1), (20, 30), (0, 33)], num_groups=1)
    assert contiguous_keys(batch, (WHOLE,), 6, same) == [None]
    (found,) = contiguous_keys(batch, (WHOLE,), 7, same)
    assert found is not None
    assert found.pages is not None
    assert found.pages.shape == (7,)


def test_warm_up_lists_page_0_and_has_no_rows() -> None:
    keys = padding_keys(3, torch.device("cpu"))
    assert keys.pages is not None
    assert keys.pages.tolist() == [0, 0, 0]
    assert keys.cu_q.tolist() == keys.cu_k.tolist() == [0] * 4
    assert padding_keys(0, torch.device("cpu")).pages is None
