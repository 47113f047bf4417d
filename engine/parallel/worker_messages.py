"""What worker 0 of a tensor-parallel engine, which schedules, sends to the other workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.execution.step_shape import StepShape, reachable_shapes
from loramux.engine.sequences.batch import Batch, PooledRows, ScoredRows
from loramux.kernels.layout import RowCounts

_BATCH_ARRAYS = (
    "tokens",
    "positions",
    "slots",
    "cu_q",
    "seq_lens",
    "blocks",
    "block_starts",
    "kv_slots",
    "state_starts",
    "sample_rows",
)
"""The arrays of a `Batch`."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A numpy array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Array:
        return cls(array.dtype.str, array.shape, bytearray(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))

    @property
    def array(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Run a step. `arrays` are those of its batch, in the order of `_BATCH_ARRAYS`.

    How tokens are sampled is left out, because only worker 0 samples.
    """

    arrays: tuple[Array, ...]
    max_q: int
    scores: tuple[ScoredRows, ...]
    pooled: tuple[PooledRows, ...]

    @classmethod
    def of(cls, batch: Batch) -> RunStep:
        arrays = tuple(Array.of(getattr(batch, name)) for name in _BATCH_ARRAYS)
        return cls(arrays, batch.max_q, batch.scores, batch.pooled)

    @property
    def batch(self) -> Batch:
        arrays: dict[str, Any] = {name: one.array for name, one in zip(_BATCH_ARRAYS, self.arrays, strict=True)}
        return Batch(**arrays, max_q=self.max_q, samples=(), scores=self.scores, pooled=self.pooled)


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    """Run all shapes that steps of these limits can have, and capture some of them (`GraphExecutor.warm_up`)."""

    max_batch_tokens: int
    max_sequences: int

    @property
    def shapes(self) -> Iterator[StepShape]:
        return reachable_shapes(self.max_batch_tokens, self.max_sequences)


class PlaceAdapter(msgspec.Struct, frozen=True, tag=True):
    """Copy the worker's share of an adapter into `pages`, and point `slot` at it. The other fields are those of
    `PackedAdapter` and its layout.
    """

    slot: int
    pages: list[int]
    digest: str
    ranks: Array
    outer_ranks: Array
    has_affines: bool
    rows: RowCounts
    scales: Array
    outer_scales: Array
    payload: Array

    @classmethod
    def of(cls, slot: int, pages: list[int], packed: PackedAdapter) -> PlaceAdapter:
        layout = packed.layout
        return cls(
            slot=slot,
            pages=pages,
            digest=packed.digest,
            ranks=Array.of(layout.ranks),
            outer_ranks=Array.of(layout.outer_ranks),
            has_affines=layout.has_affines,
            rows=layout.rows,
            scales=Array.of(packed.scales),
            outer_scales=Array.of(packed.outer_scales),
            payload=Array.of(packed.payload),
        )


ToWorker = RunStep | WarmUp | PlaceAdapter
