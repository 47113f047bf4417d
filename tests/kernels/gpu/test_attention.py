from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.kernels.layout import PageGeometry
from loramux.kernels.reference.attention import to_codes
from loramux.kernels.reference.kernels import ReferenceKernels
from loramux.kernels.tables import AttentionBatch, AttentionSpec, PoolViews
from tests.kernels.gpu.interpreted import DEVICE, FOR_GPUS, HAS_GPU, check_overflow, import_kernels, run_interpreted
from tests.kernels.pools import poisoned_int8_pool
from tests.kernels.sequences import LAYER, batch_of, free_unseen, in_groups, plain_attention, store_for_gpu

kernel_module, attention_module, plan_module = import_kernels("rotate_and_store", "attention", "attention_plan")
rotate_and_store = kernel_module.rotate_and_store
AttentionPlan, Tiling = plan_module.AttentionPlan, plan_module.Tiling
attention_plan, check_attention = plan_module.attention_plan, plan_module.check_attention
paged_attention = attention_module.paged_attention

# In older Triton versions, the interpreter warns about every loop's bound.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

NUM_LAYERS = 2
POISON = 1 << 30
"""An invalid page number."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The GPU, or the host if kernels are interpreted."""
    if not HAS_GPU:
        run_interpreted(monkeypatch)
    return DEVICE


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Sequences in shuffled pages of a poisoned pool, plus their K and V as dense tensors."""

    pool: PoolViews
    batch: AttentionBatch
    k: torch.Tensor  # [sum of contexts, num_kv_heads, head_dim], as stored
    v: torch.Tensor


def moved(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    tensors = (batch.cu_q, batch.seq_lens, batch.pages, batch.page_starts, batch.kv_slots)
    return AttentionBatch(*(tensor.to(device) for tensor in tensors), batch.max_q)  # type: ignore[call-arg]


def kv_write(k: torch.Tensor, v: torch.Tensor, pool: PoolViews, layer: int, batch: AttentionBatch) -> None:
    """Store K and V unchanged: each row is rotated by an angle of zero."""
    num_rows, _, head_dim = k.shape
    cos, sin = torch.ones(num_rows, head_dim // 2).to(k.device), torch.zeros(num_rows, head_dim // 2).to(k.device)
    rotate_and_store(torch.zeros(num_rows, 1, head_dim).to(k), k, v, cos, sin, pool, layer, batch)


def context_of(
    contexts: Sequence[int],
    num_queries: Sequence[int],
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
    *,
    listed_backwards: bool = False,
) -> Context:
    geometry = PageGeometry(NUM_LAYERS, spec.num_kv_heads, spec.head_dim, dtype.itemsize, dtype.itemsize)
    num_pages = sum(-(-length // 16) for length in contexts) + 2
    poisoned = make_poisoned_pool(num_pages, geometry, dtype)
    raw = poisoned.raw.to(device)
    pool = PoolViews(raw=raw, kv=raw.view(dtype), adapter=raw.view(dtype), geometry=geometry)
    pages = torch.randperm(num_pages, dtype=torch.int32)
    if spec.sliding_window is not None:
        pool, pages = in_groups(pool, pages)
    # The rows of K and V are views into wider rows, as in the output of a fused q/k/v linear layer.
    width = spec.num_kv_heads * spec.head_dim
    kv = torch.randn(sum(contexts), 2 * width).to(device, dtype)
    k, v = (x.unflatten(1, (spec.num_kv_heads, spec.head_dim)) for x in kv.split(width, 1))
    store_for_gpu(pool, k, v, LAYER, moved(batch_of(contexts, contexts, pages, POISON), device))
    batch = batch_of(contexts, num_queries, pages, POISON, listed_backwards=listed_backwards)
    batch = free_unseen(batch, spec.sliding_window, pool, POISON)
    return Context(pool, moved(batch, device), k, v)


def attended(
    q: torch.Tensor,
    context: Context,
    spec: AttentionSpec,
    plan: AttentionPlan,  # type: ignore[valid-type]
    batch: AttentionBatch | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel's output. The output and the workspace are poisoned before the launch."""
    batch = batch or context.batch
    elements = plan.workspace_elements(q.shape[0], batch.seq_lens.shape[0], spec)  # type: ignore[attr-defined]
    workspace = torch.full((elements,), torch.nan, device=q.device)
    counters = torch.zeros(
        plan.num_counters(q.shape[0], batch.seq_lens.shape[0], spec),  # type: ignore[attr-defined]
        dtype=torch.int32,
        device=q.device,
    )
    out = torch.full_like(q, torch.nan)
    paged_attention(q, context.pool, LAYER, batch, spec, plan, workspace, counters, out, sinks)
    assert not counters.any(), "the next launch needs zeros"
    return out


def check_attention_of(
    contexts: Sequence[int],
    num_queries: Sequence[int],
    spec: AttentionSpec,
    dtype: torch.dtype,
    plan: AttentionPlan,  # type: ignore[valid-type]
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
    *,
    listed_backwards: bool = False,
) -> None:
    context = context_of(
        contexts, num_queries, spec, dtype, device, make_poisoned_pool, listed_backwards=listed_backwards
    )
    q = queries(sum(num_queries), spec, dtype, device)
    check(attended(q, context, spec, plan), q, context, spec, contexts, num_queries)


def queries(num_rows: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    width = spec.num_heads * spec.head_dim
    qkv = (torch.randn(num_rows, width + 24) * 2).to(device, dtype)
    return qkv[:, 8 : width + 8].unflatten(1, (spec.num_heads, spec.head_dim))


TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def check(
    out: torch.Tensor,
    q: torch.Tensor,
    context: Context,
    spec: AttentionSpec,
    contexts: Sequence[int],
    num_queries: Sequence[int],
    sinks: torch.Tensor | None = None,
) -> None:
    row, start = 0, 0
    for length, rows in zip(contexts, num_queries, strict=True):
        span = slice(start, start + length)
        expected = plain_attention(q[row : row + rows], context.k[span], context.v[span], spec, sinks)
        torch.testing.assert_close(out[row : row + rows].double(), expected, **TOLERANCE[q.dtype])
        row, start = row + rows, start + length


SMALL_TILES = AttentionPlan(
    short=Tiling(min_rows=1, max_rows=1, block_m=16, tile_n=32, num_splits=2, num_warps=4, num_stages=2),
    long=Tiling(min_rows=2, max_rows=1 << 30, block_m=32, tile_n=32, num_splits=1, num_warps=4, num_stages=2),
)
"""A plan with several query tiles, key tiles and splits, even for short contexts."""

HEADS = {
    "mha-8": (2, 2, 8),
    "gqa-4-64": (8, 2, 64),
    "gqa-8-72": (8, 1, 72),
    "gqa-4-128": (4, 1, 128),
    "gqa-3-256": (3, 1, 256),
    "gqa-2-512": (2, 1, 512),
}
"""Numbers of query heads and KV heads, and head_dim."""

MIXED = [33, 21, 1, 70], [1, 21, 1, 9]

BATCHES = {
    "one-token": ([1], [1]),
    "decode": ([5, 33, 17, 90], [1, 1, 1, 1]),
    "prefill": ([5, 16, 40], [5, 16, 40]),
    "chunked-prefill": ([100, 17], [20, 2]),
    "mixed": MIXED,
}
"""Context lengths and numbers of query rows."""

MASKS = {
    "whole": (None, None),
    "soft-cap": (None, 5.0),
    "window-20-soft-cap": (20, 2.0),
}


HEADS_AND_MASKS = [
    # The interpreter is slow. It runs half of the heads without a mask, and half with a window and a soft cap.
    pytest.param(
        *heads,
        *mask,
        id=f"{name}-{of}",
        marks=() if name == ("whole", "window-20-soft-cap")[number % 2] else FOR_GPUS,
    )
    for name, mask in MASKS.items()
    for number, (of, heads) in enumerate(HEADS.items())
]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "sliding_window", "soft_cap"), HEADS_AND_MASKS)
def test_heads_and_masks_of_a_mixed_batch_equal_plain_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None,
    soft_cap: float | None,
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, sliding_window, soft_cap)
    check_attention_of(*MIXED, spec, torch.float32, SMALL_TILES, device, make_poisoned_pool)


@pytest.mark.parametrize(("contexts", "num_queries"), BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("sliding_window", [None, 20], ids=["whole", "window-20"])
def test_every_kind_of_batch_equals_plain_attention(
    contexts: list[int],
    num_queries: list[int],
    sliding_window: int | None,
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    spec = AttentionSpec(4, 1, 16, 0.25, sliding_window)
    check_attention_of(contexts, num_queries, spec, torch.float32, SMALL_TILES, device, make_poisoned_pool)


@pytest.mark.parametrize(
    ("num_splits", "min_tiles"), [(1, 1), (2, 1), (4, 2)], ids=["one-split", "two-splits", "short-contexts-unsplit"]
)
@pytest.mark.parametrize("sliding_window", [None, 50], ids=["whole", "window-50"])
def test_sinks_take_part_once_however_a_context_is_split(
    num_splits: int,
    min_tiles: int,
    sliding_window: int | None,
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    assert SMALL_TILES.short is not None
    assert SMALL_TILES.long is not None
    plan = AttentionPlan(
        replace(SMALL_TILES.short, num_splits=num_splits, min_tiles=min_tiles),
        replace(SMALL_TILES.long, num_splits=num_splits, min_tiles=min_tiles),
    )
    spec = AttentionSpec(4, 1, 16, 0.25, sliding_window)
    contexts, num_queries = [70, 20, 100], [1, 1, 5]
    context = context_of(contexts, num_queries, spec, torch.float32, device, make_poisoned_pool)
    q = queries(sum(num_queries), spec, torch.float32, device)
    sinks = torch.tensor([40.0, -200.0, 0.5, 300.0]).to(device)
    check(attended(q, context, spec, plan, sinks=sinks), q, context, spec, contexts, num_queries, sinks)


def test_pages_can_be_listed_in_any_order(device: torch.device, make_poisoned_pool: Callable[..., PoolViews]) -> None:
    spec = AttentionSpec(4, 1, 16, 0.25)
    check_attention_of(*MIXED, spec, torch.float32, SMALL_TILES, device, make_poisoned_pool, listed_backwards=True)


@pytest.mark.parametrize(
    ("dtype", "short_rows", "sliding_window"),
    [
        pytest.param(torch.float32, 3, None, id="float32-three-short-rows"),
        pytest.param(torch.float16, 1, None, id="float16"),
        pytest.param(torch.bfloat16, 1, 50, id="bfloat16-window-50"),
    ],
)
def test_the_chosen_plan_equals_plain_attention_in_each_dtype(
    dtype: torch.dtype,
    short_rows: int,
    sliding_window: int | None,
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    spec = AttentionSpec(4, 1, 64, 0.125, sliding_window)
    plan = attention_plan(26, 4, spec, dtype.itemsize, short_rows=short_rows, num_processors=2)
    check_attention_of([190, 90, 3, 30], [1, 20, 3, 2], spec, dtype, plan, device, make_poisoned_pool)


def test_a_split_prefill_equals_plain_attention(
    device: torch.device, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    assert SMALL_TILES.long is not None
    plan = AttentionPlan(None, replace(SMALL_TILES.long, num_splits=4))
    spec = AttentionSpec(4, 1, 24, 0.2)
    check_attention_of([130, 31], [15, 3], spec, torch.float32, plan, device, make_poisoned_pool)


def test_search_finds_more_sequences_than_one_pass_covers(
    device: torch.device, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    contexts, num_queries = [1] * 254 + [20, 3, 30], [0] * 254 + [20, 3, 30]
    plan = AttentionPlan(None, SMALL_TILES.long)
    spec = AttentionSpec(1, 1, 8, 0.3)
    check_attention_of(contexts, num_queries, spec, torch.float32, plan, device, make_poisoned_pool)


def test_captured_launch_reads_the_batch_from_device_memory(
    device: torch.device, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    """Shapes and plan stay fixed while the number, lengths and kinds of sequences change. Padding is not written."""
    spec = AttentionSpec(4, 1, 16, 0.25)
    contexts = [90, 20, 41, 7]
    context = context_of(contexts, [1, 1, 1, 1], spec, torch.float32, device, make_poisoned_pool)
    q = queries(24, spec, torch.float32, device)
    out = torch.empty_like(q)
    static = moved(context.batch, device)
    plan = attention_plan(24, 4, spec, 4, num_processors=2)
    workspace = torch.empty(plan.workspace_elements(24, 4, spec), device=device)
    counters = torch.zeros(plan.num_counters(24, 4, spec), dtype=torch.int32, device=device)

    def launch() -> None:
        paged_attention(q, context.pool, LAYER, static, spec, plan, workspace, counters, out)

    replay = launch
    if device.type == "cuda":
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        replay = graph.replay
    for num_queries in ([1, 1, 1, 1], [3, 20, 1, 0], [0, 0, 17, 7], [0, 0, 0, 0]):
        static.cu_q.copy_(torch.tensor([0, *torch.tensor(num_queries).cumsum(0)]))
        # A sequence without rows is padding, so its length is ignored.
        static.seq_lens.copy_(torch.tensor([n if r else 0 for n, r in zip(contexts, num_queries, strict=True)]))
        out.fill_(torch.nan)
        replay()
        check(out, q, context, spec, contexts, num_queries)
        assert out[sum(num_queries) :].isnan().all()


@pytest.mark.filterwarnings("ignore:All-NaN (slice|axis) encountered:RuntimeWarning")
def test_non_finite_row_does_not_affect_others(
    device: torch.device, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    spec = AttentionSpec(4, 1, 16, 0.25)
    contexts, num_queries = [30, 40, 50], [1, 5, 1]
    context = context_of(contexts, num_queries, spec, torch.float32, device, make_poisoned_pool)
    q = queries(7, spec, torch.float32, device)
    q[3, 1] = torch.nan
    q[6] = torch.nan
    out = attended(q, context, spec, SMALL_TILES)
    assert out[3, 1].isnan().all()
    assert out[6].isnan().all()
    out[3, 1], out[6] = 0, 0
    assert out.isfinite().all()


@pytest.mark.parametrize("num_rows", [0, 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kv_write_stores_only_the_rounded_values(
    num_rows: int, dtype: torch.dtype, device: torch.device, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    heads, head_dim, num_pages = 3, 8, 5
    geometry = PageGeometry(NUM_LAYERS, heads, head_dim, dtype.itemsize, dtype.itemsize)
    raw = make_poisoned_pool(num_pages, geometry, dtype).raw.to(device)
    pool = PoolViews(raw=raw, kv=raw.view(dtype), adapter=raw.view(dtype), geometry=geometry)
    before = raw.clone()
    kv_slots = torch.randperm(num_pages * 16, device=device)[:num_rows]
    is_padding = torch.arange(num_rows, device=device) % 7 == 3
    unused = torch.zeros(1, dtype=torch.int32, device=device)
    batch = AttentionBatch(unused, unused, unused, unused, torch.where(is_padding, -1, kv_slots), num_rows)
    k, v = torch.randn(num_rows, heads, head_dim, device=device), torch.randn(num_rows, heads, head_dim, device=device)
    if num_rows:
        # Ties round to even.
        k[0, 0, :2] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    # The interpreter truncates to bfloat16 where a GPU rounds.
    rtol = 2**-7 if dtype is torch.bfloat16 and device.type == "cpu" else 0.0
    kv_write(k, v, pool, LAYER, batch)

    assert torch.equal(raw[:, 0], before[:, 0])
    planes = pool.kv[:, LAYER].unflatten(1, (2, heads, 16, head_dim)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    stored, untouched = kv_slots[~is_padding], torch.ones(num_pages * 16, dtype=torch.bool, device=device)
    untouched[stored] = False
    for plane, rows in zip(planes, (k, v), strict=True):
        torch.testing.assert_close(plane[stored], rows[~is_padding].to(dtype), rtol=rtol, atol=0)
        assert plane[untouched].isnan().all()


HEADS = {"joined": (5, 1, 32, 32), "part-of-head": (4, 2, 40, 12), "odd-heads": (3, 3, 24, 24)}
"""Numbers of query heads and KV heads, head_dim, and number of rotated elements per head."""


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "rotated"), HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("num_rows", [0, 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rotated_and_stored_rows_match_the_reference(
    dtype: torch.dtype,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotated: int,
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    """The reference stores K in the CPU's layout, so the pools are compared position by position."""
    num_pages = 5
    geometry = PageGeometry(NUM_LAYERS, num_kv_heads, head_dim, dtype.itemsize, dtype.itemsize)
    expected_pool = make_poisoned_pool(num_pages, geometry, dtype)
    raw = expected_pool.raw.clone().to(device)
    pool = PoolViews(raw=raw, kv=raw.view(dtype), adapter=raw.view(dtype), geometry=geometry)
    kv_slots = torch.randperm(num_pages * 16)[:num_rows]
    is_padding = torch.arange(num_rows) % 7 == 3
    unused = torch.zeros(1, dtype=torch.int32)
    batch = AttentionBatch(unused, unused, unused, unused, torch.where(is_padding, -1, kv_slots), num_rows)
    # The rows of q, k and v are views into one wider row, as in the output of a fused linear layer.
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    wide = torch.randn(num_rows, sum(widths) + 9).to(device, dtype)
    before = wide.clone()
    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in wide[:, 4:-5].split(widths, 1))
    angle = torch.randn(num_rows, rotated // 2)
    rows = [x.to("cpu", torch.float32, copy=True) for x in (q, k, v)]
    padded = q[is_padding].clone()
    poisoned = torch.where(is_padding[:, None], torch.nan, angle).to(device)
    rotate_and_store(q, k, v, poisoned.cos(), poisoned.sin(), pool, LAYER, moved(batch, device))

    reference = ReferenceKernels(expected_pool)
    reference.rotate_and_store(*rows, angle.cos(), angle.sin(), LAYER, batch)  # type: ignore[call-arg]
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(q.cpu().float()[~is_padding], rows[0][~is_padding], rtol=tolerance, atol=tolerance)
    assert torch.equal(q[is_padding], padded)
    assert torch.equal(wide[:, 4 + widths[0] :], before[:, 4 + widths[0] :])
    assert torch.equal(wide[:, :4], before[:, :4])
    half = geometry.kv_elements // 2
    shape = (num_kv_heads, 16, head_dim)
    found, specified = pool.kv.cpu(), expected_pool.kv
    keys = specified[..., :half].unflatten(-1, (num_kv_heads, head_dim, 16)).transpose(-1, -2)
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(found[..., :half].unflatten(-1, shape), keys, **close)
    # V is not rotated.
    assert torch.equal(found[..., half:].nan_to_num(7.0), specified[..., half:].nan_to_num(7.0))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "rotated"), HEADS.values(), ids=HEADS.keys())
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rotated_rows_are_rounded_to_the_codes_of_the_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, device: torch.device
) -> None:
    num_rows, num_pages = 20, 3
    geometry = PageGeometry(NUM_LAYERS, num_kv_heads, head_dim, 1, 4, elements_per_scale=head_dim)
    with device:
        pool = poisoned_int8_pool(num_pages, geometry)
    kv_slots = torch.randperm(num_pages * 16)[:num_rows]
    unused = torch.zeros(1, dtype=torch.int32)
    batch = AttentionBatch(unused, unused, unused, unused, torch.where(torch.arange(num_rows) == 4, -1, kv_slots), 1)
    q, k, v = (torch.randn(num_rows, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    k[2, 0, 1], v[3, 0, 0], k[5, 0], v[6, 0], k[7, 0] = torch.nan, torch.inf, 0.0, 1e-40, 1e30
    angle = torch.randn(num_rows, rotated // 2)
    on_device = [one.to(device) for one in (q, k, v, angle.cos(), angle.sin())]
    rotate_and_store(*on_device, pool, LAYER, moved(batch, device))

    reference = ReferenceKernels(poisoned_int8_pool(num_pages, geometry))
    reference.rotary(q, k, angle.cos(), angle.sin())  # type: ignore[call-arg]
    places = pool.kv.cpu()[:, LAYER].unflatten(1, (2, num_kv_heads, 16, head_dim)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    assert pool.kv_scales is not None
    scales = pool.kv_scales.cpu()[:, LAYER].unflatten(1, (2, num_kv_heads, 16)).permute(1, 0, 3, 2).flatten(1, 2)
    is_stored = batch.kv_slots >= 0
    for half, x in enumerate((k, v)):
        codes, expected_scales = to_codes(x[is_stored])
        found = places[half][batch.kv_slots[is_stored]]
        close = {"rtol": 2.0**-7, "atol": 0.0, "equal_nan": True}
        torch.testing.assert_close(scales[half][batch.kv_slots[is_stored]], expected_scales, **close)
        assert ((found.int() - codes.int()).abs() <= 1)[expected_scales.isfinite()].all()
        assert scales[half].isnan().sum() == expected_scales.isnan().sum() + (48 - int(is_stored.sum())) * num_kv_heads


def test_splits_give_the_same_bits_whichever_ends_last(
    device: torch.device, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    """Partial results are combined in the order of their splits. A GPU's programs end in any order."""
    spec = AttentionSpec(4, 2, 16, 0.25)
    # The interpreter runs the programs in one order.
    contexts, num_queries = ([300, 40, 7, 150] if HAS_GPU else [140, 20, 7]), ([1, 3, 1, 1] if HAS_GPU else [1, 3, 1])
    context = context_of(contexts, num_queries, spec, torch.float32, device, make_poisoned_pool)
    q = queries(sum(num_queries), spec, torch.float32, device)
    assert SMALL_TILES.short is not None
    plan = replace(SMALL_TILES, short=replace(SMALL_TILES.short, num_splits=8))
    first = attended(q, context, spec, plan)
    check(first, q, context, spec, contexts, num_queries)
    for _ in range(300 * HAS_GPU):
        assert torch.equal(attended(q, context, spec, plan), first)


REFUSED = {
    "head-dim-12": (AttentionSpec(4, 2, 12, 1.0), PageGeometry(1, 2, 12, 2, 2), "multiples of 8 from 8 to 512"),
    "head-dim-520": (AttentionSpec(4, 2, 520, 1.0), PageGeometry(1, 2, 520, 2, 2), "multiples of 8 from 8 to 512"),
    "uneven-heads": (AttentionSpec(5, 2, 8, 1.0), PageGeometry(1, 2, 8, 2, 2), "cannot share 2 KV heads"),
    "group-129": (AttentionSpec(129, 1, 8, 1.0), PageGeometry(1, 1, 8, 2, 2), "at most 128 can share one"),
    "other-pages": (AttentionSpec(6, 3, 8, 1.0), PageGeometry(1, 4, 8, 2, 2), "does not divide the pages'"),
    "page-of-32": (AttentionSpec(4, 2, 8, 1.0), PageGeometry(1, 2, 8, 2, 2, 32), "pages of 16"),
    "window-0": (
        AttentionSpec(4, 2, 8, 1.0, 0),
        PageGeometry(1, 2, 8, 2, 2),
        "sliding_window is 0; it must be at least 1",
    ),
}


@pytest.mark.parametrize(("spec", "geometry", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_attention_is_refused_with_its_limit(
    spec: AttentionSpec, geometry: PageGeometry, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_attention(spec, geometry)


PLANS: dict[str, Any] = {
    "empty": (0, 0, False),
    "one-sequence": (1, 1, False),
    "decode-256": (256, 256, True),
    "chunk": (512, 3, False),
    "prefill": (8192, 4, False),
}


@pytest.mark.parametrize(("num_tokens", "num_sequences", "all_short"), PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("head_dim", [8, 64, 128, 256, 512])
@pytest.mark.parametrize("group_size", [1, 7, 71, 128])
def test_plans_are_within_bounds(
    num_tokens: int, num_sequences: int, all_short: bool, head_dim: int, group_size: int
) -> None:
    num_kv_heads = 2 if head_dim <= 256 else 1
    spec = AttentionSpec(group_size * num_kv_heads, num_kv_heads, head_dim, 1.0)
    check_attention(spec, PageGeometry(1, num_kv_heads, head_dim, 2, 2))
    plan = attention_plan(num_tokens, num_sequences, spec, 2, all_short=all_short)
    assert (plan.long is None) == all_short
    for tiling in (plan.short, plan.long):
        if tiling is not None:
            assert tiling.num_splits >= 1
            assert tiling.block_m >= group_size * tiling.block_q(group_size) > 0
            # Shared memory must fit the queries and two or three stages of K and V.
            block_d = max(16, head_dim)
            assert (tiling.block_m + 2 * tiling.num_stages * tiling.tile_n) * block_d * 2 <= 227 * 1024
    assert plan.workspace_elements(num_tokens, num_sequences, spec) * 4 < 1 << 30


COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from loramux.kernels.gpu import fused
from loramux.kernels.layout import PageGeometry
from loramux.kernels.gpu.attention import paged_attention
from loramux.kernels.gpu.attention_plan import attention_plan
from loramux.kernels.gpu.rotate_and_store import rotate_and_store
from loramux.kernels.tables import AttentionBatch, AttentionSpec, PoolViews

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", int(sys.argv[2]), 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

compiled = []
run = JITFunction.run

def compile_only(self, *args, grid, warmup=False, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    compiled.append(self.fn.__name__)
    waits, triggers = ("griddepcontrol." + name in kernel.asm["ptx"] for name in ("wait", "launch_dependents"))
    assert waits == options["PDL"] == bool(kernel.metadata.launch_pdl)
    assert triggers == (options["PDL"] and self.fn.__name__ == "_rotate_and_store")
    if options.get("IS_SPLIT"):
        stored, _, counted = kernel.asm["ptx"].partition("atom.global.gpu.acq_rel.add")
        assert counted, "partial results are not published to other multiprocessors"
        assert stored.rindex("bar.sync") > stored.rindex("st.global"), "threads may publish before others have stored"
    return kernel

driver.set_active(Hopper())
JITFunction.run = compile_only
SPECS = {
    "llama": (AttentionSpec(32, 8, 128, 0.09), torch.bfloat16),
    "gemma": (AttentionSpec(16, 8, 256, 0.06, 4096, 50.0), torch.bfloat16),
    "gemma4": (AttentionSpec(8, 1, 512, 1.0), torch.bfloat16),
    "odd": (AttentionSpec(6, 2, 72, 0.1), torch.float16),
    "exact": (AttentionSpec(4, 4, 40, 0.1, 100), torch.float32),
}
spec, dtype = SPECS[sys.argv[1]]
geometry = PageGeometry(2, spec.num_kv_heads, spec.head_dim, dtype.itemsize, dtype.itemsize)
raw = torch.zeros(4, 2, geometry.page_bytes, dtype=torch.uint8)
pool = PoolViews(raw, raw.view(dtype), raw.view(dtype), geometry)
integers = torch.zeros(65, dtype=torch.int32)
slots = torch.zeros(64, dtype=torch.int64)
batch = AttentionBatch(integers, integers[:64], integers, integers[:64], slots, 64)
q = torch.zeros(64, spec.num_heads, spec.head_dim, dtype=dtype)
k = torch.zeros(64, spec.num_kv_heads, spec.head_dim, dtype=dtype)
plan = attention_plan(64, 64, spec, dtype.itemsize)
workspace = torch.zeros(plan.workspace_elements(64, 64, spec))
counters = torch.zeros(plan.num_counters(64, 64, spec), dtype=torch.int32)
angle = torch.zeros(64, spec.head_dim // 2)
x, weight = q.flatten(1), torch.zeros(spec.num_heads * spec.head_dim, dtype=dtype)
for pdl in (False, True):
    rotate_and_store(q, k, k, angle, angle, pool, 1, batch, pdl=pdl)
    rotate_and_store(q, None, None, angle, angle, pool, 1, batch, pdl=pdl)
    paged_attention(q, pool, 1, batch, spec, plan, workspace, counters, q, torch.zeros(spec.num_heads), pdl=pdl)
    paged_attention(q, pool, 1, batch, spec, plan, workspace, counters, q, pdl=pdl)
    fused.rms_norm(q, weight[: spec.head_dim], 1e-5, pdl=pdl)
    fused.add_rms_norm(x, x.clone(), weight, 1e-5, pdl=pdl)
    fused.silu_and_mul(x, pdl=pdl)
    fused.gelu_and_mul(x, pdl=pdl)
    fused.clamped_silu_and_mul(x, 1.702, 7.0, pdl=pdl)
print(*sorted(set(compiled)))
"""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "capability"),
    [*((name, 90) for name in ("llama", "gemma", "gemma4", "odd", "exact")), ("llama", 100)],
)
def test_everything_compiles_with_and_without_overlapping_launches(model: str, capability: int, tmp_path: Path) -> None:
    """The compiler rejects some code that the interpreter accepts. Compiling needs no GPU."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, model, str(capability)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["_attend", "_gate", "_norm", "_rotate_and_store"]


@pytest.mark.campaign
@pytest.mark.parametrize("head_dim", [*range(8, 257, 8), 320, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(None, None), (333, 30.0)], ids=["whole", "gemma"])
def test_long_contexts_of_every_head_dim_equal_plain_attention(
    head_dim: int,
    dtype: torch.dtype,
    sliding_window: int | None,
    soft_cap: float | None,
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    spec = AttentionSpec(8, 2, head_dim, head_dim**-0.5, sliding_window, soft_cap)
    contexts, num_queries, processors = [1999, 1, 700, 333, 515], [1, 1, 300, 333, 2], 132
    if device.type == "cpu":
        contexts, num_queries, processors = [411, 1, 360], [1, 1, 50], 2
    plan = attention_plan(sum(num_queries), len(contexts), spec, dtype.itemsize, num_processors=processors)
    check_attention_of(contexts, num_queries, spec, dtype, plan, device, make_poisoned_pool)


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1, 200, 20))
def test_every_context_length_equals_plain_attention(
    first: int, device: torch.device, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    spec = AttentionSpec(4, 2, 16, 0.25)
    contexts = list(range(first, first + 20))
    for num_queries in ([1] * 20, [min(n, 1 + i * 3) for i, n in enumerate(contexts)]):
        check_attention_of(contexts, num_queries, spec, torch.float32, SMALL_TILES, device, make_poisoned_pool)


def test_pages_past_4_gib_are_written_and_read(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest pages' elements are beyond 2^31, where 32-bit arithmetic would overflow."""
    check_overflow(monkeypatch)
    spec = AttentionSpec(4, 2, 128, 0.1)
    geometry = PageGeometry(32, 2, 128, 2, 2)
    num_pages = (5 << 30) // geometry.total_page_bytes
    assert num_pages * geometry.kv_elements * geometry.num_layers > 1 << 31
    # On a host, only the pages that the test touches use physical memory.
    raw = torch.empty(num_pages, 32, geometry.page_bytes, dtype=torch.uint8, device=device)
    pool = PoolViews(raw, raw.view(torch.float16), raw.view(torch.float16), geometry)
    pages = torch.tensor([num_pages - 1, 0, num_pages - 2, 1], dtype=torch.int32)
    context = Context(
        pool, moved(batch_of([60], [1], pages, POISON), device), *torch.randn(2, 60, 2, 128).half().to(device)
    )
    kv_write(context.k, context.v, pool, LAYER, moved(batch_of([60], [60], pages, POISON), device))
    q = queries(1, spec, torch.float16, device)
    plan = attention_plan(1, 1, spec, 2, all_short=True)
    check(attended(q, context, spec, plan), q, context, spec, [60], [1])
