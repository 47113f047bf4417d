from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from loramux.kernels.layout import PageGeometry
from loramux.kernels.reference.attention import contiguous_attention
from loramux.kernels.tables import AttentionSpec, ContiguousKeys, PoolViews
from tests.kernels.gpu.interpreted import DEVICE, FOR_GPUS, HAS_GPU, import_kernels, run_interpreted
from tests.kernels.pools import poisoned_int8_pool
from tests.kernels.sequences import (
    LAYER,
    batch_of,
    plain_attention,
    store_for_gpu,
    store_with_kernels,
    with_contiguous_keys,
)

kernels_module, contiguous_module = import_kernels("kernels", "contiguous_attention")

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

POISON = 1 << 30
"""An invalid page number."""

HEADS = {"gqa-4-16": (4, 1, 16), "mha-24": (2, 2, 24), "gqa-2-72": (6, 3, 72)}
"""Numbers of query heads and KV heads, and head_dim."""

FRESH = [21, 1, 36, 20, 1, 3], [21, 1, 36, 1, 1, 3]
"""Context lengths and numbers of query rows. No prefill has a prefix, but decodes do."""

CHUNKED = [18, 37, 5, 1, 50, 16], [1, 9, 5, 1, 3, 1]
PREFILLS = [52, 17], [20, 2]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if not HAS_GPU:
        run_interpreted(monkeypatch)
    return DEVICE


class Contiguous:
    """The reference of contiguous attention, which notes what it reads and overwrites the rows between prefills."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: ContiguousKeys,
        spec: AttentionSpec,
        out: torch.Tensor,
    ) -> None:
        self.keys.append(k)
        out[: keys.num_rows] = torch.nan
        contiguous_attention(q, k, v, keys, spec, out)


def attended(
    contexts: Sequence[int],
    num_queries: Sequence[int],
    spec: AttentionSpec,
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
    attention: Any,
    *,
    gathers: bool,
    dtype: torch.dtype = torch.float32,
    sinks: torch.Tensor | None = None,
    stores_kv: bool = True,
    is_int8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of a step's rows, and those of attention in float64 over the rotated K."""
    num_pages = sum(-(-length // 16) for length in contexts) + 2
    if is_int8:
        geometry = PageGeometry(2, spec.num_kv_heads, spec.head_dim, 1, 4, elements_per_scale=spec.head_dim)
        with device:
            pool = poisoned_int8_pool(num_pages, geometry)
    else:
        geometry = PageGeometry(2, spec.num_kv_heads, spec.head_dim, dtype.itemsize, dtype.itemsize)
        raw = make_poisoned_pool(num_pages, geometry, dtype).raw.to(device)
        pool = PoolViews(raw=raw, kv=raw.view(dtype), adapter=raw.view(dtype), geometry=geometry)
    kernels = kernels_module.GpuKernels(pool, contiguous_attention=attention)
    pages = torch.randperm(num_pages, dtype=torch.int32)
    q_out, kv_out = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def rows_of(num_rows: int) -> list[torch.Tensor]:
        """q, k and v as views into the output of a fused linear layer."""
        qkv = torch.randn(num_rows, q_out + 2 * kv_out).to(device, dtype)
        return [one.unflatten(1, (-1, spec.head_dim)) for one in qkv.split((q_out, kv_out, kv_out), 1)]

    def on_device(batch: Any) -> Any:
        names = ("cu_q", "seq_lens", "pages", "page_starts", "kv_slots")
        return replace(batch, **{name: getattr(batch, name).to(device) for name in names})

    angle = torch.randn(max(contexts), spec.head_dim // 2).to(device)
    cos, sin = angle.cos(), angle.sin()
    # Store whole contexts first. The step then stores its own rows, the last of each context, again.
    position = torch.cat([torch.arange(length) for length in contexts]).to(device)
    _, k, v = rows_of(sum(contexts))
    whole = on_device(batch_of(contexts, contexts, pages, POISON))
    half = spec.head_dim // 2
    a, b = k[..., :half].float(), k[..., half:].float()
    c, s = cos[position][:, None], sin[position][:, None]
    rotated = torch.cat([a * c - b * s, b * c + a * s], -1).to(dtype)
    if is_int8:
        store_with_kernels(kernels, rotated, v, LAYER, whole)
    else:
        store_for_gpu(pool, rotated, v, LAYER, whole)
    is_last = torch.cat(
        [torch.arange(length) >= length - rows for length, rows in zip(contexts, num_queries, strict=True)]
    ).to(device)
    q = rows_of(int(is_last.sum()))[0]
    own = [torch.cat([torch.zeros_like(one[is_last]), one[is_last]], 1)[:, one.shape[1] :] for one in (k, v)]
    batch = with_contiguous_keys(batch_of(contexts, num_queries, pages, POISON), gathers=gathers, poison=POISON)
    keys = batch.contiguous
    assert keys is not None
    listed = None if keys.pages is None else keys.pages.to(device)
    keys = replace(keys, cu_q=keys.cu_q.to(device), cu_k=keys.cu_k.to(device), pages=listed, rows_per_key=1e9)
    batch = replace(on_device(batch), contiguous=keys)
    kernels.rotate_and_store(q, own[0], own[1], cos[position[is_last]], sin[position[is_last]], LAYER, batch)
    out = torch.full_like(q, torch.nan)
    kernels.paged_attention(q, LAYER, batch, spec, out, sinks, (own[0], own[1]) if stores_kv else None)

    expected, row, start = [], 0, 0
    for length, rows in zip(contexts, num_queries, strict=True):
        span = slice(start, start + length)
        expected.append(plain_attention(q[row : row + rows], rotated[span], v[span], spec, sinks))
        row, start = row + rows, start + length
    return out, torch.cat(expected)


def spec_of(heads: str, window: int | None = None, soft_cap: float | None = None) -> AttentionSpec:
    num_heads, num_kv_heads, head_dim = HEADS[heads]
    return AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, window, soft_cap)


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 20], ids=["whole", "window-20"])
@pytest.mark.parametrize("heads", HEADS)
def test_prefills_without_prefix_read_the_rows_of_the_projection(
    heads: str, window: int | None, device: torch.device, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    attention = Contiguous()
    check(*attended(*FRESH, spec_of(heads, window), device, make_poisoned_pool, attention, gathers=False))
    assert [len(k) for k in attention.keys] == [sum(FRESH[1])]


@pytest.mark.parametrize("batch", [CHUNKED, PREFILLS], ids=["with-decodes", "without-decodes"])
@pytest.mark.parametrize("heads", HEADS)
def test_prefills_with_prefix_read_gathered_pages(
    heads: str,
    batch: tuple[list[int], list[int]],
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    attention = Contiguous()
    check(*attended(*batch, spec_of(heads, 30), device, make_poisoned_pool, attention, gathers=True))
    num_pages = sum(-(-length // 16) for length, rows in zip(*batch, strict=True) if rows > 1)
    assert [len(k) for k in attention.keys] == [16 * num_pages]


@pytest.mark.parametrize(
    ("batch", "gathers", "dtype"),
    [
        pytest.param(FRESH, False, torch.float32, id="fresh-float32"),
        pytest.param(FRESH, False, torch.bfloat16, id="fresh-bfloat16", marks=FOR_GPUS),
        pytest.param(CHUNKED, True, torch.float32, id="chunked-float32", marks=FOR_GPUS),
        pytest.param(CHUNKED, True, torch.bfloat16, id="chunked-bfloat16"),
    ],
)
def test_codes_are_gathered_as_bfloat16(
    batch: tuple[list[int], list[int]],
    gathers: bool,
    dtype: torch.dtype,
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    attention, spec = Contiguous(), spec_of("gqa-2-72", 30)
    out, expected = attended(
        *batch, spec, device, make_poisoned_pool, attention, gathers=gathers, dtype=dtype, is_int8=True
    )
    torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=3e-2)
    assert [k.dtype for k in attention.keys] == [torch.bfloat16] * (dtype is torch.bfloat16)


@pytest.mark.parametrize("case", ["soft-cap", "sinks", "shared-kv", "few-rows", "many-pages"])
def test_attention_that_contiguous_keys_cannot_serve_reads_pages(
    case: str,
    device: torch.device,
    make_poisoned_pool: Callable[..., PoolViews],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of("gqa-4-16", soft_cap=5.0 if case == "soft-cap" else None)
    sinks = torch.tensor([40.0, -200.0, 0.5, 300.0], device=device) if case == "sinks" else None
    if case == "few-rows":
        monkeypatch.setattr(contiguous_module, "MIN_PAIRS_PER_KEY", 1e12)
    if case == "many-pages":
        monkeypatch.setattr(contiguous_module, "MAX_GATHERED_BYTES", 1)
    gathers = case in ("few-rows", "many-pages", "sinks")
    attention = Contiguous()
    out, expected = attended(
        *(CHUNKED if gathers else FRESH), spec, device, make_poisoned_pool, attention, gathers=gathers, sinks=sinks,
        stores_kv=case != "shared-kv",
    )  # fmt: skip
    check(out, expected)
    assert not attention.keys


@pytest.mark.skipif(not HAS_GPU, reason="torch has FlashAttention only for GPUs")
@pytest.mark.parametrize("window", [None, 20], ids=["whole", "window-20"])
@pytest.mark.parametrize(("batch", "gathers"), [(FRESH, False), (CHUNKED, True)], ids=["fresh", "chunked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_flash_attention_equals_plain_attention(
    dtype: torch.dtype,
    batch: tuple[list[int], list[int]],
    gathers: bool,
    window: int | None,
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    spec = spec_of("gqa-2-72", window)
    flash = contiguous_module.flash_attention
    out, expected = attended(*batch, spec, DEVICE, make_poisoned_pool, flash, gathers=gathers, dtype=dtype)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("writes_out", [True, False], ids=["into-out", "copied"])
def test_flash_attention_matches_the_operators_of_torch(writes_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch accepts the call of either operator. Over meta tensors, nothing is computed."""
    spec = replace(spec_of("gqa-4-16"), sliding_window=20)
    meta = torch.device("meta")
    q, k = (torch.empty(9, heads, 16, dtype=torch.bfloat16, device=meta) for heads in (4, 1))
    bounds = torch.zeros(4, dtype=torch.int32, device=meta)
    keys = ContiguousKeys(bounds, bounds, None, 9, 9, 9, 1.0, False)
    monkeypatch.setattr(contiguous_module, "_WRITES_OUT", writes_out)
    contiguous_module.flash_attention(q, k, k, keys, spec, torch.empty_like(q))
