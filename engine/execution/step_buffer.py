"""A step's metadata: laid out once per shape, filled in host memory, and copied to the device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.device.accelerator import Accelerator, Fence
from loramux.engine.execution.sampler import uniforms_of, used_temperature
from loramux.engine.execution.step_shape import StepShape, step_shape
from loramux.engine.sequences.batch import Batch, OuterSlots, StepInputs
from loramux.kernels.segments import SEGMENT_ROWS, group_rows
from loramux.kernels.tables import AttentionBatch, ContiguousKeys, Segments

ALIGNMENT = 16
"""Alignment of fields, in bytes, as required by vector loads."""

NUM_STAGES = 2
"""Number of host buffers: one is filled while a copy may still be reading the other."""

_BY_GROUP = ("kv_slots", "block_starts")
"""Fields with a row for each of `CacheLayout.groups`."""

_DTYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """Sampling settings of the sample rows, `[num_sequences]` each, in the format of `kernels/gpu/sampling.py`."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    dtype: torch.dtype
    count: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.count * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Views of one shape's fields, on the device and in each host buffer."""

    shape: StepShape
    inputs: StepInputs
    sampling: SamplingInputs
    head_segments: Segments | None
    """Segments of the sample rows whose adapters modify the head, or None if the shape has no outer modules."""
    staged: tuple[dict[str, npt.NDArray[np.generic]], ...]
    blocks_offset: int

    def with_contiguous_keys(self, keys: Sequence[ContiguousKeys | None]) -> StepLayout:
        """The layout for one step that is not captured. `keys` has an entry for each of `CacheLayout.groups`."""
        attention = tuple(
            replace(one, contiguous=found) for one, found in zip(self.inputs.attention, keys, strict=True)
        )
        return replace(self, inputs=replace(self.inputs, attention=attention))


class StepBuffer:
    """Device memory for one step's metadata, and the host memory from which it is copied.

    A shape's views never move, so a captured step finds each batch at the same address. Views have exactly the shape's
    size. A larger batch cannot be stored, so a captured step never reads more rows, sequences or segments than it was
    captured for.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        max_tokens: int,
        max_sequences: int,
        max_listed_blocks: int,
        num_groups: int = 1,
        has_states: bool = False,
    ) -> None:
        largest = step_shape(max_tokens, max_sequences, max_q=2, max_rank=1, has_outer=True)
        # A smaller step with short segments can have more segments.
        largest = replace(largest, segment_rows=SEGMENT_ROWS)
        decode = step_shape(max_sequences, max_sequences, max_q=1, max_rank=1, has_outer=True)
        block_bytes = max_listed_blocks * torch.int32.itemsize
        ends = [_fields(shape, num_groups, has_states)[-1].end for shape in (largest, decode)]
        num_bytes = max(ends) + ALIGNMENT + block_bytes
        self._accelerator = accelerator
        self.max_listed_blocks = max_listed_blocks
        self.max_tokens = largest.num_tokens
        """Maximum number of rows of a step, with padding."""
        self._num_groups = num_groups
        self._has_states = has_states
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=accelerator.device)
        self._stages = [accelerator.host_buffer(num_bytes) for _ in range(NUM_STAGES)]
        self._copied: list[Fence | None] = [None] * NUM_STAGES
        self._turn = 0
        self._layouts: dict[StepShape, StepLayout] = {}

    def load(self, batch: Batch, shape: StepShape, outer: OuterSlots | None = None) -> StepLayout:
        """Store a batch in the layout of `shape`, and submit the copy to the device. All batches of a shape get the
        same views.

        `outer` marks the rows that need outer modules. Pass it if and only if the shape has outer modules. Raises
        ValueError if the batch does not fit into the shape.
        """
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = self._lay_out(shape)
        turn = self._turn = (self._turn + 1) % NUM_STAGES
        copied = self._copied[turn]
        if copied is not None:
            copied.wait()
        _fill(layout.staged[turn], batch, shape, outer)
        end = layout.blocks_offset + batch.blocks.nbytes
        self._on_device[:end].copy_(self._stages[turn][:end], non_blocking=True)
        self._copied[turn] = self._accelerator.fence()
        return layout

    def _lay_out(self, shape: StepShape) -> StepLayout:
        fields = _fields(shape, self._num_groups, self._has_states)
        # The blocks come last, because batches list different numbers of blocks, and `load` copies no unused ones.
        blocks_offset = _aligned(fields[-1].end)
        fields.append(_Field("blocks", torch.int32, self.max_listed_blocks, blocks_offset))

        def views(memory: torch.Tensor) -> dict[str, torch.Tensor]:
            found = {one.name: memory[one.offset : one.end].view(one.dtype) for one in fields}
            return {
                name: view.view(self._num_groups, -1) if name in _BY_GROUP else view for name, view in found.items()
            }

        on_device = views(self._on_device)

        def segments(name: str, max_rows: int) -> Segments:
            rows, starts, slots = (on_device[f"{name}_{part}"] for part in ("rows", "starts", "slots"))
            return Segments(rows, starts, slots, shape.max_rank, max_rows, adapters=on_device.get(f"{name}_adapters"))

        def batch_of(starts: torch.Tensor, kv_slots: torch.Tensor) -> AttentionBatch:
            return AttentionBatch(
                cu_q=on_device["cu_q"],
                seq_lens=on_device["seq_lens"],
                pages=on_device["blocks"],
                page_starts=starts,
                kv_slots=kv_slots,
                # A captured graph serves every batch of the shape, so this is not the maximum of one batch.
                max_q=1 if shape.is_decode else shape.num_tokens,
            )

        return StepLayout(
            shape=shape,
            inputs=StepInputs(
                tokens=on_device["tokens"],
                positions=on_device["positions"],
                attention=tuple(map(batch_of, on_device["block_starts"], on_device["kv_slots"])),
                slots=on_device["slots"],
                segments=segments("segment", shape.segment_rows),
                sample_rows=on_device["sample_rows"],
                embedding_segments=segments("embedding", shape.segment_rows) if shape.has_outer else None,
                groups=shape.groups,
                expands_first=shape.expands_first,
                states=batch_of(on_device["state_starts"], on_device["kv_slots"][0]) if self._has_states else None,
            ),
            sampling=SamplingInputs(
                **{name: on_device[name] for name in ("temperature", "top_k", "top_p", "min_p", "uniform")}
            ),
            head_segments=segments("head", SEGMENT_ROWS) if shape.has_outer else None,
            staged=tuple({name: view.numpy() for name, view in views(stage).items()} for stage in self._stages),
            blocks_offset=blocks_offset,
        )


def _fields(shape: StepShape, num_groups: int, has_states: bool) -> list[_Field]:
    """All fields except the blocks, whose number differs between batches."""
    sizes = {
        "kv_slots": (torch.int64, num_groups * shape.num_tokens),
        "tokens": (torch.int32, shape.num_tokens),
        "positions": (torch.int32, shape.num_tokens),
        "slots": (torch.int32, shape.num_tokens if shape.max_rank else 0),
        "cu_q": (torch.int32, shape.num_sequences + 1),
        "seq_lens": (torch.int32, shape.num_sequences),
        "block_starts": (torch.int32, num_groups * shape.num_sequences),
        "state_starts": (torch.int32, shape.num_sequences if has_states else 0),
        "sample_rows": (torch.int32, shape.num_sequences),
        "segment_rows": (torch.int32, shape.num_tokens if shape.max_rank else 0),
        "segment_starts": (torch.int32, shape.num_segments + 1),
        "segment_slots": (torch.int32, shape.num_segments),
        "segment_adapters": (torch.int32, min(shape.num_tokens, shape.num_sequences) if shape.max_rank else 0),
        "temperature": (torch.float32, shape.num_sequences),
        "top_k": (torch.int32, shape.num_sequences),
        "top_p": (torch.float32, shape.num_sequences),
        "min_p": (torch.float32, shape.num_sequences),
        "uniform": (torch.float32, shape.num_sequences),
    }
    if shape.has_outer:
        sizes |= {
            "embedding_rows": (torch.int32, shape.num_tokens),
            "embedding_starts": (torch.int32, shape.num_segments + 1),
            "embedding_slots": (torch.int32, shape.num_segments),
            # Each sequence has at most one sample row, and each sample row can be its own segment.
            "head_rows": (torch.int32, shape.num_sequences),
            "head_starts": (torch.int32, shape.num_sequences + 1),
            "head_slots": (torch.int32, shape.num_sequences),
        }
    fields: list[_Field] = []
    offset = 0
    for name, (dtype, count) in sizes.items():
        fields.append(_Field(name, dtype, count, offset))
        offset = _aligned(fields[-1].end)
    return fields


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _fill(staged: dict[str, npt.NDArray[np.generic]], batch: Batch, shape: StepShape, outer: OuterSlots | None) -> None:
    """Write a batch, followed by padding: rows whose K and V are not stored, and sequences without rows."""

    def put(name: str, values: npt.NDArray[np.generic], padding: int = 0) -> None:
        field, count = staged[name], values.shape[-1]
        if count > field.shape[-1]:
            raise ValueError(f"{count} {name} do not fit into a step of {field.shape[-1]}")
        field[..., :count] = values
        field[..., count:] = padding

    def put_segments(name: str, slots_of_rows: npt.NDArray[np.int32], max_rows: int) -> None:
        rows, starts, slots = group_rows(slots_of_rows, max_rows)
        put(f"{name}_rows", rows)
        put(f"{name}_starts", starts, padding=len(rows))
        put(f"{name}_slots", slots, padding=-1)
        if f"{name}_adapters" in staged:
            # Slots are in ascending order.
            put(f"{name}_adapters", slots[np.diff(slots, prepend=-1) != 0], padding=-1)

    put("kv_slots", batch.kv_slots, padding=-1)
    put("tokens", batch.tokens)
    put("positions", batch.positions)
    put("cu_q", batch.cu_q, padding=batch.num_tokens)
    put("seq_lens", batch.seq_lens)
    put("block_starts", batch.block_starts)
    put("state_starts", batch.state_starts)
    put("sample_rows", batch.sample_rows)
    if shape.max_rank:
        put("slots", batch.slots, padding=-1)
        put_segments("segment", batch.slots, shape.segment_rows)
    if shape.has_outer != (outer is not None):
        raise ValueError("outer slots must be given if and only if the shape has outer modules")
    if outer is not None:
        put_segments("embedding", outer.embedding, shape.segment_rows)
        put_segments("head", outer.head, SEGMENT_ROWS)
    params = [one.params for one in batch.samples]
    put("temperature", np.array([used_temperature(one.temperature) for one in params], np.float32))
    put("top_k", np.array([one.top_k for one in params], np.int32))
    put("top_p", np.array([one.top_p for one in params], np.float32), padding=1)
    put("min_p", np.array([one.min_p for one in params], np.float32))
    # Greedy sampling reads no random numbers, and deriving them takes time.
    is_random = any(one.temperature > 0 for one in params)
    put("uniform", uniforms_of(batch.samples) if is_random else np.zeros(len(params), np.float32))
    if len(batch.blocks) > len(staged["blocks"]):
        raise ValueError(f"{len(batch.blocks)} blocks do not fit into a step of {len(staged['blocks'])}")
    # No padding is needed, because `load` copies only these blocks, and padding sequences read none.
    staged["blocks"][: len(batch.blocks)] = batch.blocks
