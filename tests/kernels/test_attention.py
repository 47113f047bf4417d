from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import AttentionBatch, AttentionSpec, PoolViews
from tests.kernels.gpu.interpreted import FOR_GPUS, HAS_GPU
from tests.kernels.sequences import LAYER, batch_of, free_unseen, in_groups, plain_attention, store

NUM_LAYERS = 2


HEADS = {
    "mha": (2, 2, 16),
    "gqa-4": (8, 2, 64),
    "gqa-3": (3, 1, 24),
    "gqa-6": (6, 1, 8),
    "head-dim-40": (4, 2, 40),
    "gqa-20": (20, 1, 16),
    "head-dim-256": (2, 1, 256),
    "head-dim-512": (2, 1, 512),
}
"""Numbers of query heads and KV heads, and head_dim."""

BATCHES = {
    "one-token": ([1], [1]),
    "decode": ([5, 33, 16, 17, 100], [1, 1, 1, 1, 1]),
    "prefill": ([5, 16, 40], [5, 16, 40]),
    "chunked-prefill": ([50, 17], [20, 2]),
    "mixed": ([33, 40, 1, 70, 18], [1, 40, 1, 9, 1]),
}
"""Context lengths and numbers of query rows."""


SCORES = {"whole": (None, None), "window-7": (7, None), "soft-cap": (None, 5.0), "window-20-soft-cap": (20, 2.0)}
"""Sliding windows and soft caps."""


def cases() -> Iterator[Any]:
    """Every test run combines each two of a batch, heads and scores. GPUs and the campaign combine all three."""
    for (i, batch), (j, heads), (k, scores) in product(enumerate(BATCHES), enumerate(HEADS), enumerate(SCORES)):
        marks = () if (i + j + k) % len(SCORES) == 0 else FOR_GPUS
        yield pytest.param(BATCHES[batch], HEADS[heads], SCORES[scores], id=f"{scores}-{heads}-{batch}", marks=marks)


@pytest.mark.parametrize(("batch", "heads", "scores"), list(cases()))
def test_equals_a_plain_softmax(
    batch: tuple[list[int], list[int]],
    heads: tuple[int, int, int],
    scores: tuple[int | None, float | None],
    dtype: torch.dtype,
    make_kernels: Callable[..., Any],
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    _, _, head_dim = heads
    spec = AttentionSpec(*heads, head_dim**-0.5, *scores)
    check_attention(*batch, spec, dtype, make_kernels, make_poisoned_pool)


@pytest.mark.parametrize(
    ("contexts", "num_queries", "sliding_window"),
    [
        pytest.param([900, 3, 400], [1, 1, 1], None, id="decode-on-all-threads"),
        pytest.param([900, 3, 400], [1, 1, 1], 100, id="windowed-decode-on-all-threads"),
        pytest.param([300], [150], None, id="several-tiles"),
        pytest.param([300], [300], 40, id="several-windowed-tiles"),
    ],
)
def test_long_contexts_equal_a_plain_softmax(
    contexts: list[int],
    num_queries: list[int],
    sliding_window: int | None,
    dtype: torch.dtype,
    make_kernels: Callable[..., Any],
    make_poisoned_pool: Callable[..., PoolViews],
    request: pytest.FixtureRequest,
) -> None:
    if request.node.callspec.params["make_kernels"] == "gpu" and not HAS_GPU:
        # The interpreter is slow, and a decode's tiles have at most 64 keys.
        contexts = [min(length, 300) for length in contexts]
    spec = AttentionSpec(8, 2, 32, 0.2, sliding_window)
    check_attention(contexts, num_queries, spec, dtype, make_kernels, make_poisoned_pool)


SINKS = {
    "decode": (BATCHES["decode"], (8, 2, 16), None, None),
    "windowed-decode": (BATCHES["decode"], (6, 1, 8), 7, None),
    "mixed": (BATCHES["mixed"], (6, 1, 24), None, None),
    "windowed-prefill": (BATCHES["prefill"], (4, 2, 16), 20, None),
    "soft-cap": (BATCHES["chunked-prefill"], (4, 2, 16), None, 2.0),
}


@pytest.mark.parametrize(("batch", "heads", "sliding_window", "soft_cap"), SINKS.values(), ids=SINKS)
def test_a_sink_takes_its_share_of_the_softmax(
    batch: tuple[list[int], list[int]],
    heads: tuple[int, int, int],
    sliding_window: int | None,
    soft_cap: float | None,
    make_cpu_kernels: Callable[..., Any],
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    """Some sinks are above and some far below all other scores. `gpu/test_attention.py` tests the GPU kernel."""
    spec = AttentionSpec(*heads, 0.3, sliding_window, soft_cap)
    sinks = torch.randn(spec.num_heads) * 2
    sinks[:3] = torch.tensor([40.0, -200.0, 300.0])
    check_attention(*batch, spec, torch.float32, make_cpu_kernels, make_poisoned_pool, sinks=sinks)


def test_pages_can_be_listed_in_any_order(
    dtype: torch.dtype, make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    spec = AttentionSpec(4, 2, 16, 0.25)
    contexts, num_queries = BATCHES["mixed"]
    check_attention(contexts, num_queries, spec, dtype, make_kernels, make_poisoned_pool, listed_backwards=True)


@pytest.mark.parametrize("sliding_window", [None, 7, 20], ids=["whole", "window-7", "window-20"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS.values(), ids=HEADS.keys())
def test_row_is_bitwise_independent_of_other_rows(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    from loramux.kernels.cpu.kernels import CpuKernels

    spec, length = AttentionSpec(num_heads, num_kv_heads, head_dim, 0.3, sliding_window), 45
    geometry = PageGeometry(NUM_LAYERS, num_kv_heads, head_dim, dtype.itemsize, dtype.itemsize)
    kernels = CpuKernels(make_poisoned_pool(4, geometry, dtype))
    pages, poison = torch.randperm(3, dtype=torch.int32), 3
    k, v = torch.randn(2, length, num_kv_heads, head_dim)
    kernels.kv_write(k, v, LAYER, batch_of([length], [length], pages, poison))
    q, sinks = torch.randn(length, num_heads, head_dim), torch.randn(num_heads)

    def attend(begin: int, end: int) -> torch.Tensor:
        """Attention for query rows `[begin, end)`, in a step without other rows."""
        out = torch.empty(end - begin, num_heads, head_dim)
        batch = batch_of([end], [end - begin], pages, poison)
        kernels.paged_attention(q[begin:end], LAYER, batch, spec, out, sinks)
        return out

    whole = attend(0, length)
    for begin, end in [(row, row + 1) for row in range(length)] + [(0, 17), (3, 40), (17, 45)]:
        assert torch.equal(attend(begin, end), whole[begin:end])


def check_attention(
    contexts: list[int],
    num_queries: list[int],
    spec: AttentionSpec,
    dtype: torch.dtype,
    make_kernels: Callable[..., Any],
    make_poisoned_pool: Callable[..., PoolViews],
    *,
    listed_backwards: bool = False,
    sinks: torch.Tensor | None = None,
) -> None:
    geometry = PageGeometry(NUM_LAYERS, spec.num_kv_heads, spec.head_dim, dtype.itemsize, dtype.itemsize)
    num_pages = sum(-(-length // 16) for length in contexts) + 3
    pool, pages = make_poisoned_pool(num_pages, geometry, dtype), torch.randperm(num_pages - 1, dtype=torch.int32)
    # The last page is never written.
    poison = num_pages - 1
    if spec.sliding_window is not None:
        pool, pages = in_groups(pool, pages)
        poison *= NUM_LAYERS
    kernels = make_kernels(pool)
    batch = batch_of(contexts, num_queries, pages, poison, listed_backwards=listed_backwards)
    # The rows of K and V are views into wider rows, as in the output of a fused q/k/v linear layer.
    width = spec.num_kv_heads * spec.head_dim
    kv = torch.randn(sum(contexts), 2 * width).to(dtype).float()
    k = kv[:, :width].unflatten(1, (spec.num_kv_heads, spec.head_dim))
    v = kv[:, width:].unflatten(1, (spec.num_kv_heads, spec.head_dim))
    store(kernels, pool, k, v, LAYER, batch_of(contexts, contexts, pages, poison))
    batch = free_unseen(batch, spec.sliding_window, pool, poison)

    q = torch.randn(sum(num_queries), spec.num_heads, spec.head_dim) * 2
    out = torch.full_like(q, torch.nan)
    kernels.paged_attention(q, LAYER, batch, spec, out, sinks)

    row, context = 0, 0
    for length, rows in zip(contexts, num_queries, strict=True):
        span = slice(context, context + length)
        expected = plain_attention(q[row : row + rows], k[span], v[span], spec, sinks)
        torch.testing.assert_close(out[row : row + rows].double(), expected, rtol=1e-4, atol=2e-5)
        row, context = row + rows, context + length


def test_layers_with_fewer_heads_have_more_pages_in_the_same_pool(
    dtype: torch.dtype, make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    """A page of the pool holds one page of the wide layers, or two of the narrow ones."""
    wide, narrow = AttentionSpec(4, 2, 16, 0.25), AttentionSpec(4, 1, 16, 0.25)
    geometry = PageGeometry(NUM_LAYERS, wide.num_kv_heads, wide.head_dim, dtype.itemsize, dtype.itemsize)
    pool, poison = make_poisoned_pool(6, geometry, dtype), 5 * NUM_LAYERS
    pool, _ = in_groups(pool, torch.zeros(0))
    kernels = make_kernels(pool)
    length = 40
    # Pages 0, 2 and 4, and the halves of pages 1 and 3.
    pages = {wide: torch.tensor([0, 4, 8]), narrow: torch.tensor([6, 4, 14])}
    stored: dict[AttentionSpec, torch.Tensor] = {}
    for spec, of_spec in pages.items():
        stored[spec] = torch.randn(2, length, spec.num_kv_heads, spec.head_dim).to(dtype).float()
        k, v = stored[spec]
        store(kernels, pool, k, v, LAYER, batch_of([length], [length], of_spec.int(), poison))
    for spec, of_spec in pages.items():
        q = torch.randn(3, spec.num_heads, spec.head_dim)
        batch = batch_of([length], [3], of_spec.int(), poison)
        expected = plain_attention(q, *stored[spec], spec)  # type: ignore[call-arg]
        out = torch.full_like(q, torch.nan)
        # A layer that reads the K and V of another one stores none.
        kernels.rotate_and_store(q, None, None, torch.ones(3, 8), torch.zeros(3, 8), LAYER, batch)
        kernels.paged_attention(q, LAYER, batch, spec, out)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("num_rows", [1, 40, 4000], ids=["one-row", "40-rows", "on-all-threads"])
def test_kv_write_stores_only_the_rounded_values(
    num_rows: int,
    dtype: torch.dtype,
    make_cpu_kernels: Callable[..., Any],
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    heads, head_dim = 3, 8
    geometry = PageGeometry(NUM_LAYERS, heads, head_dim, dtype.itemsize, dtype.itemsize)
    num_pages = -(-num_rows // 16) + 2
    pool = make_poisoned_pool(num_pages, geometry, dtype)
    before = pool.raw.clone()
    kv_slots = torch.randperm(num_pages * 16)[:num_rows]
    batch = AttentionBatch(
        cu_q=torch.tensor([0, num_rows], dtype=torch.int32),
        seq_lens=torch.tensor([num_rows], dtype=torch.int32),
        pages=torch.zeros(1, dtype=torch.int32),
        page_starts=torch.zeros(1, dtype=torch.int32),
        kv_slots=kv_slots,
        max_q=num_rows,
    )
    k, v = torch.randn(num_rows, heads, head_dim), torch.randn(num_rows, heads, head_dim)
    # Ties, overflow to infinity, infinity and NaN are rounded as in torch.
    special = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, torch.inf, -torch.inf, torch.nan, -0.0, 1e-40])
    k[0, 0] = v[0, 1] = special
    make_cpu_kernels(pool).kv_write(k, v, LAYER, batch)

    assert torch.equal(pool.raw[:, 0], before[:, 0])
    half = geometry.kv_elements // 2
    keys = pool.kv[:, LAYER, :half].unflatten(1, (heads, head_dim, 16)).permute(0, 3, 1, 2).flatten(0, 1)
    values = pool.kv[:, LAYER, half:].unflatten(1, (heads, 16, head_dim)).permute(0, 2, 1, 3).flatten(0, 1)
    for stored, rows in ((keys, k), (values, v)):
        torch.testing.assert_close(stored[kv_slots], rows.to(dtype), rtol=0, atol=0, equal_nan=True)
        untouched = torch.ones(num_pages * 16, dtype=torch.bool)
        untouched[kv_slots] = False
        assert stored[untouched].isnan().all()
