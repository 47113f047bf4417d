from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.execution.sampler import used_temperature
from loramux.engine.execution.step_buffer import StepBuffer
from loramux.engine.execution.step_shape import MAX_SINGLE_ROWS, StepShape, reachable_shapes, step_shape
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.sequences.batch import NO_ROWS, Batch, OuterSlots, ScheduledSequence, build_batch
from loramux.engine.sequences.sequence import PageTable, Sequence, block_list
from loramux.kernels.segments import SEGMENT_ROWS, group_rows

MAX_TOKENS, MAX_SEQUENCES, MAX_PAGES = 600, 96, 96 * 8


def a_batch(chunks: list[tuple[int, int, int]], seed: int = 0) -> Batch:
    """A batch of sequences given as `(computed, new tokens, slot)`, grouped by slot."""
    rng = np.random.default_rng(seed)
    scheduled = []
    for index, (num_computed, num_tokens, slot) in enumerate(sorted(chunks, key=lambda one: one[2])):
        end = num_computed + num_tokens
        prompt = tuple(int(token) for token in rng.integers(0, 1000, end))
        sampling = SamplingParams(temperature=float(index % 2), top_k=index, top_p=0.5, min_p=index / 128, seed=index)
        add = Add(sequence_id=str(index), prompt=prompt, max_tokens=9, sampling=sampling)
        tables = [PageTable(block_list(rng.integers(0, 1000, -(-end // 16)).tolist()))]
        sequence = Sequence(
            add=add, owner=b"", arrival=index, seed=index, slot=slot, num_computed=num_computed, tables=tables
        )
        scheduled.append(ScheduledSequence(sequence, num_tokens))
    return build_batch(scheduled, 16)


def shape_of(batch: Batch, max_rank: int = 16) -> StepShape:
    return step_shape(batch.num_tokens, batch.num_sequences, batch.max_q, max_rank if (batch.slots >= 0).any() else 0)


@pytest.fixture
def buffer() -> StepBuffer:
    return StepBuffer(HostAccelerator(), MAX_TOKENS, MAX_SEQUENCES, MAX_PAGES)


batches = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 1, 1, 2, 16, 17, 40]), st.integers(-1, 5)),
    min_size=1,
    max_size=MAX_SEQUENCES,
).filter(lambda chunks: sum(one[1] for one in chunks) <= MAX_TOKENS)


@given(batches)
@settings(max_examples=60, deadline=None)
def test_every_batch_fits_its_shape(chunks: list[tuple[int, int, int]]) -> None:
    batch = a_batch(chunks)
    shape = shape_of(batch)
    rows, _, slots = group_rows(batch.slots, shape.segment_rows)
    assert len(slots) <= shape.num_segments
    assert len(rows) <= shape.num_tokens
    assert batch.num_tokens <= shape.num_tokens
    assert batch.num_sequences <= shape.num_sequences
    assert not shape.is_decode or batch.max_q == 1


@given(st.lists(batches, min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_device_reads_the_batch_followed_by_padding(
    steps: list[list[tuple[int, int, int]]],
) -> None:
    buffer = StepBuffer(HostAccelerator(), MAX_TOKENS, MAX_SEQUENCES, MAX_PAGES)
    for seed, chunks in enumerate(steps):
        batch = a_batch(chunks, seed)
        layout = buffer.load(batch, shape_of(batch))
        num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
        inputs, attention, segments = layout.inputs, layout.inputs.attention[0], layout.inputs.segments
        for found, expected, padding in [
            (inputs.tokens, batch.tokens, 0),
            (inputs.positions, batch.positions, 0),
            (inputs.sample_rows, batch.sample_rows, 0),
            (attention.cu_q, batch.cu_q, num_tokens),
            (attention.seq_lens, batch.seq_lens, 0),
            (attention.page_starts, batch.block_starts[0], 0),
            (attention.kv_slots, batch.kv_slots[0], -1),
        ]:
            assert found[: len(expected)].tolist() == expected.tolist()
            assert (found[len(expected) :] == padding).all()
        assert attention.pages[: len(batch.blocks)].tolist() == batch.blocks.tolist()
        assert attention.cu_q.shape[0] == layout.shape.num_sequences + 1
        assert attention.max_q >= batch.max_q
        assert segments.num_segments == layout.shape.num_segments
        if layout.shape.max_rank:
            rows, starts, slots = group_rows(batch.slots, layout.shape.segment_rows)
            assert segments.max_rows == layout.shape.segment_rows
            assert segments.rows[: len(rows)].tolist() == rows.tolist()
            assert segments.starts[: len(starts)].tolist() == starts.tolist()
            assert segments.slots[: len(slots)].tolist() == slots.tolist()
            assert (segments.slots[len(slots) :] == -1).all()
        params = [one.params for one in batch.samples]
        sampling = layout.sampling
        assert sampling.temperature[: len(params)].tolist() == [one.temperature for one in params]
        assert sampling.top_k[: len(params)].tolist() == [one.top_k for one in params]
        assert sampling.min_p[: len(params)].tolist() == [one.min_p for one in params]
        assert num_sequences <= sampling.uniform.shape[0]


def outer_of(batch: Batch) -> OuterSlots:
    """Outer slots for a batch. Even slots change the embedding, and slots divisible by 3 change the head."""
    samples = batch.slots[batch.sample_rows]
    return OuterSlots(
        embedding=np.where(batch.slots % 2 == 0, batch.slots, np.int32(-1)),
        head=np.where(samples % 3 == 0, samples, np.int32(-1)),
    )


@given(st.lists(batches, min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_outer_module_rows_fit_every_shape_with_outer_modules(steps: list[list[tuple[int, int, int]]]) -> None:
    buffer = StepBuffer(HostAccelerator(), MAX_TOKENS, MAX_SEQUENCES, MAX_PAGES)
    for seed, chunks in enumerate(steps):
        batch = a_batch([*chunks[:-1], (*chunks[-1][:2], 0)], seed)
        outer = outer_of(batch)
        layout = buffer.load(batch, replace(shape_of(batch), has_outer=True), outer)
        for segments, slots, max_rows in [
            (layout.inputs.embedding_segments, outer.embedding, layout.shape.segment_rows),
            (layout.head_segments, outer.head, SEGMENT_ROWS),
        ]:
            assert segments is not None
            assert segments.max_rank == layout.shape.max_rank
            assert segments.max_rows == max_rows
            rows, starts, listed = group_rows(slots, max_rows)
            assert segments.rows[: len(rows)].tolist() == rows.tolist()
            assert segments.starts[: len(starts)].tolist() == starts.tolist()
            assert segments.slots[: len(listed)].tolist() == listed.tolist()
            assert (segments.slots[len(listed) :] == -1).all()


def test_shape_without_outer_modules_has_no_outer_tensors(buffer: StepBuffer) -> None:
    batch = a_batch([(4, 1, 0)] * 3)
    plain, outer = shape_of(batch), replace(shape_of(batch), has_outer=True)
    layout = buffer.load(batch, plain)
    assert layout.inputs.embedding_segments is None
    assert layout.head_segments is None
    assert buffer.load(batch, outer, outer_of(batch)).blocks_offset > layout.blocks_offset
    for shape, slots in ((plain, outer_of(batch)), (outer, None)):
        with pytest.raises(ValueError, match="outer modules"):
            buffer.load(batch, shape, slots)


def test_views_of_a_shape_are_reused(buffer: StepBuffer) -> None:
    first, other, second = a_batch([(4, 1, 0)] * 3), a_batch([(0, 40, 1), (3, 1, -1)]), a_batch([(70, 1, 2)] * 3)
    shape = shape_of(first)
    layout = buffer.load(first, shape)
    buffer.load(other, shape_of(other))
    assert buffer.load(second, shape) is layout
    assert layout.inputs.attention[0].seq_lens.tolist() == [71, 71, 71, 0]


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (StepShape(2, 4, False, 16), "kv_slots"),
        (StepShape(16, 2, False, 16), "cu_q"),
    ],
)
def test_batch_that_does_not_fit_is_refused(buffer: StepBuffer, shape: StepShape, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} do not fit"):
        buffer.load(a_batch([(4, 1, 0)] * 3), shape)


def test_more_segments_than_captured_are_refused(buffer: StepBuffer) -> None:
    """This batch is artificial: a scheduler never assigns one sequence's rows to several adapters."""
    batch = a_batch([(0, 48, 0)])
    shape = shape_of(batch)
    split = msgspec.structs.replace(batch, slots=np.arange(48, dtype=np.int32))
    with pytest.raises(ValueError, match="segment_starts do not fit"):
        buffer.load(split, shape)


def test_memory_is_not_refilled_before_its_copy_finishes() -> None:
    waited: list[int] = []

    class CountingFence:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)

    class CountingAccelerator(HostAccelerator):
        num_fences = 0

        def fence(self) -> CountingFence:
            self.num_fences += 1
            return CountingFence(self.num_fences)

    buffer = StepBuffer(CountingAccelerator(), MAX_TOKENS, MAX_SEQUENCES, MAX_PAGES)
    for _ in range(4):
        batch = a_batch([(4, 1, 0)])
        buffer.load(batch, shape_of(batch))
    assert waited == [1, 2]


def test_a_few_shapes_cover_all_decode_steps() -> None:
    shapes = {step_shape(count, count, 1, 16) for count in range(1, 513)}
    assert len(shapes) <= 24
    assert all(shape.is_captured for shape in shapes)
    assert {step_shape(count, count, 1, 0).num_segments for count in (1, 64, 512)} == {0}


def test_views_are_aligned_for_vector_loads(buffer: StepBuffer) -> None:
    batch = a_batch([(4, 1, 0)] * 7)
    layout = buffer.load(batch, shape_of(batch))
    base = buffer._on_device.data_ptr()
    for view in (layout.inputs.tokens, layout.inputs.attention[0].pages, layout.inputs.segments.slots):
        assert (view.data_ptr() - base) % 16 == 0
    assert layout.inputs.attention[0].kv_slots.dtype is torch.int64


@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 256), st.booleans(), st.integers(1, 700), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_captured_shape_of_a_served_batch_was_warmed_up(
    num_tokens: int, num_sequences: int, max_rank: int, is_decode: bool, num_adapters: int, has_affines: bool
) -> None:
    num_sequences = num_tokens if is_decode else min(num_sequences, num_tokens)
    max_q = 1 if is_decode else 2
    has_single_rows = max_rank > 0 and num_tokens <= MAX_SINGLE_ROWS * num_adapters
    shape = step_shape(
        num_tokens, num_sequences, max_q, max_rank, has_single_rows=has_single_rows, has_affines=has_affines
    )
    assert shape in set(reachable_shapes(700, 700)) or not shape.is_captured or num_tokens > 512


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "max_q", "expected"),
    [
        pytest.param(64, 64, 1, 16, id="decode"),
        pytest.param(2048, 128, 900, 16, id="few-rows-per-sequence"),
        pytest.param(2048, 17, 900, 64, id="many-rows-per-sequence"),
        pytest.param(200, 3, 150, 64, id="a-few-prompts"),
        pytest.param(40, 3, 38, 16, id="short-prompts"),
    ],
)
def test_segments_are_large_if_sequences_have_many_rows(
    num_tokens: int, num_sequences: int, max_q: int, expected: int
) -> None:
    assert step_shape(num_tokens, num_sequences, max_q, 16).segment_rows == expected


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "max_rank", "has_affines", "expected"),
    [
        pytest.param(512, 512, 16, False, False, id="decode"),
        pytest.param(250, 2, 16, False, False, id="few-rows"),
        pytest.param(300, 2, 16, False, True, id="a-prompt"),
        pytest.param(2048, 250, 16, False, True, id="prompts-and-decodes"),
        pytest.param(2048, 1, 16, True, False, id="affines"),
        pytest.param(2048, 1, 0, False, False, id="base"),
    ],
)
def test_large_steps_without_affines_expand_adapters_first(
    num_tokens: int, num_sequences: int, max_rank: int, has_affines: bool, expected: bool
) -> None:
    max_q = 1 if num_tokens == num_sequences else 2
    shape = step_shape(num_tokens, num_sequences, max_q, max_rank, has_affines=has_affines)
    assert shape.expands_first == expected


def test_every_shape_fits_the_largest_buffer() -> None:
    """A step with fewer rows but short segments can have more segments than the largest step."""
    buffer = StepBuffer(HostAccelerator(), 16640, 512, 1)
    for num_tokens in (16128, 16384, 16640):
        shape = replace(step_shape(num_tokens, 512, 2, 16), has_outer=True)
        nobody = OuterSlots(NO_ROWS.slots, NO_ROWS.slots)
        assert buffer.load(NO_ROWS, shape, nobody).blocks_offset < buffer._on_device.nbytes


def test_the_largest_shapes_come_first() -> None:
    """Warm-up begins with the largest shapes, so startup fails if their memory cannot be allocated."""
    shapes = list(reachable_shapes(2048, 256))
    assert (shapes[0].num_tokens, shapes[0].num_sequences, shapes[0].max_rank) == (2048, 512, 256)
    assert len(shapes) == len(set(shapes)) < 300


def test_a_step_without_rows_is_all_padding(buffer: StepBuffer) -> None:
    layout = buffer.load(NO_ROWS, StepShape(16, 8, False, 16))
    inputs = layout.inputs
    assert (inputs.attention[0].kv_slots == -1).all()
    assert (inputs.segments.slots == -1).all()
    assert not inputs.attention[0].cu_q.any()
    assert not inputs.attention[0].seq_lens.any()


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-45, 1e-30, 1.0, 1e300])
def test_device_reads_the_temperature_used_by_the_host(buffer: StepBuffer, temperature: float) -> None:
    add = Add(sequence_id="0", prompt=(1, 2), max_tokens=9, sampling=SamplingParams(temperature=temperature))
    sequence = Sequence(
        add=add, owner=b"", arrival=0, seed=0, slot=-1, num_computed=0, tables=[PageTable(block_list([1]))]
    )
    batch = build_batch([ScheduledSequence(sequence, 2)], 16)
    (found, *_) = buffer.load(batch, shape_of(batch)).sampling.temperature.tolist()
    assert found == np.float32(used_temperature(temperature))
    assert (found == 0) == (temperature == 0), "a random row stays random"
    assert math.isfinite(found)
