"""One layer's kernels, launched as in an engine step, for the reference and for the device under test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import torch

from loramux.kernels.dispatch import Kernels
from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.kernels.reference.kernels import ReferenceKernels
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AdapterTables, AttentionBatch, AttentionSpec, LoraCall, ModuleGroup, Segments
from tests.kernels.gpu.interpreted import DEVICE
from tests.kernels.pools import adapter_pool, poisoned_pool
from tests.kernels.sequences import batch_of

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
GEOMETRY = PageGeometry(num_layers=2, num_kv_heads=2, head_dim=16, kv_itemsize=4, adapter_itemsize=4)
HIDDEN = 64
QKV = ModuleGroup((0, 1, 2), HIDDEN, (64, 32, 32), (0, 64, 96))
OUTPUT = ModuleGroup((3,), HIDDEN, (HIDDEN,), (0,))
MODULES = [LinearShape(name, HIDDEN, width) for name, width in (("q", 64), ("k", 32), ("v", 32), ("o", HIDDEN))]
LAYER = 1
MAX_LEN = 32
POISON = 1 << 30
"""An invalid row, page or segment number."""


STEPS = {
    "mixed": (
        14,
        [
            ([7, 4, 1, 0], [7, 4, 1, 0], [0, 1, -1, -1]),
            ([17, 5, 2, 2], [10, 1, 1, 2], [0, 1, -1, 2]),
            ([18, 0, 0, 3], [1, 0, 0, 1], [0, -1, -1, 2]),
            ([19, 6, 3, 13], [1, 1, 1, 10], [-1, -1, -1, -1]),
            ([20, 0, 15, 14], [1, 0, 12, 1], [3, -1, 3, 0]),
        ],
    ),
    "decode": (
        4,
        [
            ([1, 1, 1, 1], [1, 1, 1, 1], [0, 1, -1, 2]),
            ([2, 2, 2, 0], [1, 1, 1, 0], [0, -1, -1, -1]),
            ([3, 3, 3, 2], [1, 1, 1, 1], [1, 1, 3, 3]),
            ([0, 0, 4, 0], [0, 0, 1, 0], [-1, -1, 2, -1]),
        ],
    ),
}
"""The number of rows in the graph, then for each step the context lengths, query rows and slots of four sequences."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    cos: torch.Tensor  # [MAX_LEN, head_dim / 2]
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """`hidden` is `[T, HIDDEN]`."""

    hidden: torch.Tensor
    cos: torch.Tensor  # [T, head_dim / 2]
    sin: torch.Tensor
    batch: AttentionBatch
    segments: Segments


def run(kernels: Kernels, weights: Weights, tables: AdapterTables, step: Step) -> list[torch.Tensor]:
    num_tokens = step.hidden.shape[0]

    def adapted(x: torch.Tensor, y: torch.Tensor, group: ModuleGroup) -> torch.Tensor:
        call = LoraCall(LAYER, group, tables, step.segments)
        planes = kernels.lora_planes(call, num_tokens)
        kernels.lora_shrink(x, call, planes)
        kernels.lora_expand(planes, call, y)
        return y

    residual = step.hidden.clone()
    x = kernels.rms_norm(residual, weights.norm, 1e-5)
    q, k, v = adapted(x, x @ weights.qkv, QKV).split((64, 32, 32), 1)
    q, k, v = q.unflatten(1, (4, 16)), k.unflatten(1, (2, 16)), v.unflatten(1, (2, 16))
    kernels.rotate_and_store(q, k, v, step.cos, step.sin, LAYER, step.batch)
    attended = torch.zeros_like(step.hidden)
    kernels.paged_attention(q, LAYER, step.batch, SPEC, attended.unflatten(1, (4, 16)))
    x = kernels.add_rms_norm(adapted(attended, attended @ weights.output, OUTPUT), residual, weights.norm, 1e-5)
    return [residual, kernels.silu_and_mul(x), kernels.gelu_and_mul(x)]


def step_of(
    contexts: Sequence[int], num_queries: Sequence[int], slots: Sequence[int], pages: torch.Tensor, weights: Weights
) -> Step:
    owned = [pages[2 * i : 2 * i + -(-length // 16)] for i, length in enumerate(contexts)]
    positions = [torch.arange(length - rows, length) for length, rows in zip(contexts, num_queries, strict=True)]
    position = torch.cat(positions)
    return Step(
        hidden=torch.randn(sum(num_queries), HIDDEN),
        cos=weights.cos[position],
        sin=weights.sin[position],
        batch=batch_of(contexts, num_queries, torch.cat(owned), POISON),
        segments=build_segments(np.repeat(np.array(slots, np.int32), num_queries), 16, max_rank=32),
    )


def padded(step: Step, num_tokens: int, num_segments: int, num_listed: int, max_q: int) -> Step:
    """The same step padded to a graph's shapes, with poison that the kernels must not read."""

    def to(tensor: torch.Tensor, length: int, value: float) -> torch.Tensor:
        tail = torch.full((length - tensor.shape[0], *tensor.shape[1:]), value, dtype=tensor.dtype)
        return torch.cat([tensor, tail]).to(DEVICE)

    batch, segments = step.batch, step.segments
    return Step(
        hidden=to(step.hidden, num_tokens, torch.nan),
        cos=to(step.cos, num_tokens, torch.nan),
        sin=to(step.sin, num_tokens, torch.nan),
        batch=AttentionBatch(
            cu_q=batch.cu_q.to(DEVICE),
            seq_lens=batch.seq_lens.to(DEVICE),
            pages=to(batch.pages, num_listed, POISON),
            page_starts=batch.page_starts.to(DEVICE),
            kv_slots=to(batch.kv_slots, num_tokens, -1),
            max_q=max_q,
        ),
        segments=Segments(
            rows=to(segments.rows, num_tokens, POISON),
            starts=to(segments.starts, num_segments + 1, POISON),
            slots=to(segments.slots, num_segments, -1),
            max_rank=segments.max_rank,
        ),
    )


def overwrite(old: Step, new: Step) -> None:
    for a, b in ((old, new), (old.batch, new.batch), (old.segments, new.segments)):
        for name in a.__slots__:
            if isinstance(getattr(a, name), torch.Tensor):
                getattr(a, name).copy_(getattr(b, name))


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One of two kernel implementations, each with its own pool. Both use the same weights and adapters."""

    kernels: Kernels
    weights: Weights
    tables: AdapterTables

    def run(self, step: Step) -> list[torch.Tensor]:
        return run(self.kernels, self.weights, self.tables, step)


def both_sides(gpu_module: ModuleType) -> tuple[Side, Side]:
    ranks = np.random.default_rng(0).choice([0, 1, 3, 16, 32], (4, 2, 4)).astype(np.int32)
    adapters = adapter_pool(MODULES, ranks, GEOMETRY, torch.float32)
    # Scale the adapters to the magnitude of the base: larger sums would only amplify rounding errors.
    adapters.tables.scale.mul_(0.02)
    kv = poisoned_pool(9, GEOMETRY, torch.float32).kv
    angle = torch.randn(MAX_LEN, 8)
    weights = Weights(torch.randn(64), torch.randn(64, 128) / 8, torch.randn(64, 64) / 8, angle.cos(), angle.sin())
    reference = Side(ReferenceKernels(replace(adapters.pool, kv=kv)), weights, adapters.tables)

    raw = adapters.pool.raw.to(DEVICE)
    pool = replace(adapters.pool, raw=raw, kv=kv.clone().to(DEVICE), adapter=raw.view(torch.float32))
    names = ("page_table", "off", "rank", "scale")
    gpu = Side(
        gpu_module.GpuKernels(pool, pdl=True),
        Weights(*(getattr(weights, name).to(DEVICE) for name in weights.__slots__)),
        AdapterTables(**{name: getattr(adapters.tables, name).to(DEVICE) for name in names}),
    )
    return reference, gpu
