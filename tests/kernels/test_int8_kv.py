"""K and V as int8 codes, in every implementation of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loramux.kernels.layout import PageGeometry
from loramux.kernels.reference.attention import to_codes
from loramux.kernels.tables import AttentionBatch, AttentionSpec, PoolViews
from tests.kernels.pools import poisoned_int8_pool
from tests.kernels.sequences import LAYER, batch_of, free_unseen, in_groups, plain_attention, store_with_kernels

NUM_LAYERS = 2
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def geometry_of(num_kv_heads: int, head_dim: int) -> PageGeometry:
    return PageGeometry(NUM_LAYERS, num_kv_heads, head_dim, 1, 4, elements_per_scale=head_dim)


def rows_near_codes(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose codes do not depend on how a quotient is rounded, and the values of these codes.

    The largest element of each row is exactly 127 scales, and the others are at least a fifth of a scale away from
    where rounding changes.
    """
    codes = torch.randint(-126, 127, shape).float()
    largest = torch.randint(0, shape[-1], shape[:-1])[..., None]
    codes.scatter_(-1, largest, torch.where(torch.rand(largest.shape) < 0.5, 127.0, -127.0))
    scales = ((torch.rand(*shape[:-1], 1) + 0.5) * 2.0 ** torch.randint(-9, -4, (*shape[:-1], 1))).bfloat16().float()
    moved = (torch.rand(shape) - 0.5) * 0.6
    moved.scatter_(-1, largest, 0.0)
    return (codes + moved) * scales, codes * scales


CASES = {
    "decode": ([5, 33, 16, 17, 100], [1, 1, 1, 1, 1], AttentionSpec(8, 2, 64, 0.125)),
    "prefill-gqa-3": ([5, 16, 40], [5, 16, 40], AttentionSpec(3, 1, 24, 0.2)),
    "mixed-window": ([33, 40, 1, 70, 18], [1, 40, 1, 9, 1], AttentionSpec(6, 1, 8, 0.3, sliding_window=7)),
    "chunked-soft-cap": ([50, 17], [20, 2], AttentionSpec(4, 2, 40, 0.15, soft_cap=5.0)),
    "decode-window-soft-cap": ([5, 90, 33], [1, 1, 1], AttentionSpec(4, 4, 16, 0.25, 20, 2.0)),
}
"""Context lengths, numbers of query rows, and the attention."""


@pytest.mark.parametrize(("contexts", "num_queries", "spec"), CASES.values(), ids=CASES.keys())
def test_attention_equals_a_plain_softmax_over_the_rounded_values(
    contexts: list[int], num_queries: list[int], spec: AttentionSpec, make_kernels: Callable[..., Any]
) -> None:
    num_pages = sum(-(-length // 16) for length in contexts) + 3
    pool, pages = (
        poisoned_int8_pool(num_pages, geometry_of(spec.num_kv_heads, spec.head_dim)),
        torch.randperm(num_pages - 1, dtype=torch.int32),
    )
    # The last page is never written.
    poison = num_pages - 1
    if spec.sliding_window is not None:
        pool, pages = in_groups(pool, pages)
        poison *= NUM_LAYERS
    kernels = make_kernels(pool)
    # The rows of K and V are views into wider rows, as in the output of a fused q/k/v linear layer.
    kv, rounded = rows_near_codes(sum(contexts), 2 * spec.num_kv_heads, spec.head_dim)
    k, v = (one.contiguous() for one in rounded.chunk(2, 1))
    store_with_kernels(kernels, *kv.chunk(2, 1), LAYER, batch_of(contexts, contexts, pages, poison))  # type: ignore[call-arg]
    batch = batch_of(contexts, num_queries, pages, poison)
    batch = free_unseen(batch, spec.sliding_window, pool, poison)

    q = torch.randn(sum(num_queries), spec.num_heads, spec.head_dim) * 2
    out = torch.full_like(q, torch.nan)
    kernels.paged_attention(q, LAYER, batch, spec, out)

    row, context = 0, 0
    for length, rows in zip(contexts, num_queries, strict=True):
        span = slice(context, context + length)
        expected = plain_attention(q[row : row + rows], k[span], v[span], spec)
        torch.testing.assert_close(out[row : row + rows].double(), expected, **CLOSE)
        row, context = row + rows, context + length


def test_sinks_take_part_beside_scaled_scores(make_cpu_kernels: Callable[..., Any]) -> None:
    spec, length = AttentionSpec(4, 2, 16, 0.3), 37
    kernels = make_cpu_kernels(poisoned_int8_pool(4, geometry_of(2, 16)))
    pages, sinks = torch.randperm(3, dtype=torch.int32), torch.tensor([3.0, -200.0, 0.5, 300.0])
    kv, rounded = rows_near_codes(length, 4, 16)
    store_with_kernels(kernels, *kv.chunk(2, 1), LAYER, batch_of([length], [length], pages, 3))  # type: ignore[call-arg]
    q = torch.randn(5, 4, 16)
    out = torch.full_like(q, torch.nan)
    kernels.paged_attention(q, LAYER, batch_of([length], [5], pages, 3), spec, out, sinks)
    expected = plain_attention(q, *rounded.chunk(2, 1), spec, sinks)  # type: ignore[call-arg]
    torch.testing.assert_close(out.double(), expected, **CLOSE)


def test_layers_of_other_head_dims_share_the_pool(make_kernels: Callable[..., Any]) -> None:
    """A page of the pool holds one page of the wide layers, or two of the narrow ones, with all of their scales."""
    wide, narrow = AttentionSpec(4, 1, 32, 0.2), AttentionSpec(4, 1, 16, 0.25)
    geometry = PageGeometry(NUM_LAYERS, wide.num_kv_heads, wide.head_dim, 1, 4, elements_per_scale=16)
    pool, _ = in_groups(poisoned_int8_pool(6, geometry), torch.zeros(0))
    kernels, length, poison = make_kernels(pool), 40, 5 * NUM_LAYERS
    # Pages 0, 2 and 4, and the halves of pages 1 and 3.
    pages = {wide: torch.tensor([0, 4, 8]).int(), narrow: torch.tensor([6, 4, 14]).int()}
    rounded: dict[AttentionSpec, torch.Tensor] = {}
    for spec, of_spec in pages.items():
        kv, rounded[spec] = rows_near_codes(length, 2, spec.head_dim)
        store_with_kernels(kernels, *kv.chunk(2, 1), LAYER, batch_of([length], [length], of_spec, poison))  # type: ignore[call-arg]
    for spec, of_spec in pages.items():
        q = torch.randn(3, spec.num_heads, spec.head_dim)
        out = torch.full_like(q, torch.nan)
        kernels.paged_attention(q, LAYER, batch_of([length], [3], of_spec, poison), spec, out)
        expected = plain_attention(q, *rounded[spec].chunk(2, 1), spec)  # type: ignore[call-arg]
        torch.testing.assert_close(out.double(), expected, **CLOSE)


def test_codes_are_the_nearest_of_the_row_s_own_scale() -> None:
    x = torch.randn(50, 3, 64) * 10.0 ** torch.randint(-30, 30, (50, 3, 1))
    codes, scales = to_codes(x)
    assert codes.dtype is torch.int8
    assert int(codes.abs().max()) == 127
    scales = scales.double()[..., None]
    assert ((codes.double() * scales - x.double()).abs() <= 0.5001 * scales).all()


SPECIAL = {
    "zeros": [0.0, 0.0],
    "negative-zero": [-0.0, 1.0],
    "subnormal": [1e-40, -1e-45],
    "tiny": [1e-37, 3e-38],
    "huge": [3.4e38, -3.4e38],
    "infinity": [torch.inf, 1.0],
    "negative-infinity": [-torch.inf, 0.0],
    "nan": [torch.nan, 2.0],
    "one-outlier": [1e6, 1e-3],
}


@pytest.mark.parametrize("values", SPECIAL.values(), ids=SPECIAL.keys())
def test_special_values_stay_in_their_row(values: list[float], make_cpu_kernels: Callable[..., Any]) -> None:
    """Finite rows are rounded as the reference says. A row that is not finite becomes NaN, and no other row does."""
    geometry = geometry_of(2, 8)
    pool = poisoned_int8_pool(2, geometry)
    k, v = torch.randn(2, 20, 2, 8)
    k[3, 1, :2] = v[4, 0, 6:] = torch.tensor(values)
    make_cpu_kernels(pool).kv_write(k, v, LAYER, batch_of([20], [20], torch.tensor([1, 0]).int(), 0))
    codes = pool.kv[[1, 0], LAYER].view(2, 2, 2, 128)
    keys = codes[:, 0].unflatten(2, (8, 16)).permute(0, 3, 1, 2).flatten(0, 1)[:20]
    stored_values = codes[:, 1].unflatten(2, (16, 8)).permute(0, 2, 1, 3).flatten(0, 1)[:20]
    assert pool.kv_scales is not None
    scales = pool.kv_scales[[1, 0], LAYER].view(2, 2, 2, 16).permute(0, 3, 1, 2).flatten(0, 1)[:20].float()
    for half, (found, x) in enumerate(((keys, k), (stored_values, v))):
        expected_codes, expected_scales = to_codes(x)
        assert torch.equal(scales[:, half].nan_to_num(7.0), expected_scales.float().nan_to_num(7.0))
        is_finite = x.isfinite().all(-1)
        assert torch.equal(scales[:, half].isfinite(), is_finite)
        assert (found[is_finite].int() - expected_codes[is_finite].int()).abs().max() <= 1
        assert (found[is_finite] == expected_codes[is_finite]).double().mean() > 0.99
    assert (pool.kv[:, 1 - LAYER] == -1).all()
    assert pool.kv_scales[:, 1 - LAYER].isnan().all()


@pytest.mark.filterwarnings("ignore:(All-NaN|invalid value|overflow):RuntimeWarning")
def test_values_that_are_not_finite_stay_in_their_sequence(make_kernels: Callable[..., Any]) -> None:
    spec, contexts = AttentionSpec(4, 2, 16, 0.25), [20, 40, 7]
    kernels = make_kernels(poisoned_int8_pool(8, geometry_of(2, 16)))
    pages = torch.randperm(7, dtype=torch.int32)
    kv, rounded = rows_near_codes(sum(contexts), 4, 16)
    poisoned = kv.clone()
    poisoned[30, 1, 3], poisoned[40, 2, 5] = torch.nan, torch.inf
    store_with_kernels(kernels, *poisoned.chunk(2, 1), LAYER, batch_of(contexts, contexts, pages, 7))  # type: ignore[call-arg]
    q = torch.randn(3, 4, 16)
    out = torch.zeros_like(q)
    kernels.paged_attention(q, LAYER, batch_of(contexts, [1, 1, 1], pages, 7), spec, out)
    # The key is of KV head 1, and the value of KV head 0.
    assert out[1].isnan().all()
    for row, span in ((0, slice(0, 20)), (2, slice(60, 67))):
        expected = plain_attention(q[row : row + 1], *rounded[span].chunk(2, 1), spec)  # type: ignore[call-arg]
        torch.testing.assert_close(out[row : row + 1].double(), expected, **CLOSE)


@pytest.mark.parametrize("sliding_window", [None, 7], ids=["whole", "window-7"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (6, 1, 8), (3, 1, 24)])
def test_row_is_bitwise_independent_of_other_rows(
    num_heads: int, num_kv_heads: int, head_dim: int, sliding_window: int | None
) -> None:
    from loramux.kernels.cpu.kernels import CpuKernels

    spec, length = AttentionSpec(num_heads, num_kv_heads, head_dim, 0.3, sliding_window), 45
    kernels = CpuKernels(poisoned_int8_pool(4, geometry_of(num_kv_heads, head_dim)))
    pages, poison = torch.randperm(3, dtype=torch.int32), 3
    k, v = torch.randn(2, length, num_kv_heads, head_dim)
    kernels.kv_write(k, v, LAYER, batch_of([length], [length], pages, poison))
    q = torch.randn(length, num_heads, head_dim)

    def attend(begin: int, end: int) -> torch.Tensor:
        """Attention for query rows `[begin, end)`, in a step without other rows."""
        out = torch.empty(end - begin, num_heads, head_dim)
        kernels.paged_attention(q[begin:end], LAYER, batch_of([end], [end - begin], pages, poison), spec, out)
        return out

    whole = attend(0, length)
    for begin, end in [(row, row + 1) for row in range(length)] + [(0, 17), (3, 40), (17, 45)]:
        assert torch.equal(attend(begin, end), whole[begin:end])


def test_padding_rows_store_nothing(make_kernels: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["make_kernels"] == "cpu":
        pytest.skip("batches on a CPU have no padding")
    pool = poisoned_int8_pool(2, geometry_of(2, 16))
    k, v = torch.randn(2, 3, 2, 16)
    unused = torch.zeros(1, dtype=torch.int32)
    batch = AttentionBatch(unused, unused, unused, unused, torch.tensor([-1, 17, -1]), 1)
    store_with_kernels(make_kernels(pool), k, v, LAYER, batch)
    assert pool.kv_scales is not None
    assert int(pool.kv_scales.isfinite().sum()) == 2 * 2


def test_pools_without_scales_are_unchanged(make_poisoned_pool: Callable[..., PoolViews]) -> None:
    geometry = PageGeometry(NUM_LAYERS, 2, 16, 2, 2)
    assert geometry.num_scales == 0
    assert geometry.pool_page_bytes == geometry.total_page_bytes
    assert make_poisoned_pool(1, geometry, torch.bfloat16).scales_of(2, 16) is None


@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 1.93), (128, 1.96), (256, 1.98)])
def test_codes_and_scales_take_almost_half_of_16_bits(head_dim: int, ratio: float) -> None:
    halves = PageGeometry(30, 3, head_dim, 2, 2)
    codes = PageGeometry(30, 3, head_dim, 1, 2, elements_per_scale=head_dim)
    assert halves.pool_page_bytes / codes.pool_page_bytes > ratio
