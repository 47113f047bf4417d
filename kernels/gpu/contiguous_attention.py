"""Attention of prefills over contiguous K and V on a GPU, in torch's FlashAttention kernel.

If no prefill of a step has a prefix, K and V are the rows of the step's own projections. Otherwise, the pages of all
prefills are first gathered into contiguous rows. `attention.py` computes the sequences with a single query row, and all
sequences if this is not possible or not worth the bytes.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.attention_plan import PAGE_TOKENS
from loramux.kernels.tables import AttentionSpec, ContiguousKeys, PoolViews

MAX_FLASH_HEAD_DIM = 256
FLASH_DTYPES = (torch.bfloat16, torch.float16)
MAX_GATHERED_BYTES = 256 << 20
"""Maximum size of one layer's gathered K and V, in bytes: 65,536 tokens of Llama-3.1-8B."""

MIN_PAIRS_PER_KEY = 512
"""Minimum mean number of (query row, query head) pairs per gathered key and KV head for which pages are gathered.

Gathering a key writes its K and V and reads them again. In Llama-3.1-8B, these 8 KiB take 2 ns at 4 TB/s. The products
of 512 pairs, 128 rows of four heads, with one key of all KV heads take 9.8 ns at 213 TFLOP/s, the rate of our kernel on
an H100, and 6.2 ns at 337 TFLOP/s, the rate of SDPA (`benchmarks/gpu/README.md`).
"""

GATHER_ELEMENTS = 8192
"""Maximum number of elements of a page that a program of the gather copies."""

_WRITES_OUT = hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace")


class ContiguousAttention(Protocol):
    """`flash_attention`, or a kernel with the same specification."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: ContiguousKeys,
        spec: AttentionSpec,
        out: torch.Tensor,
    ) -> None: ...


def has_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """True if torch was built with FlashAttention for this kind of device and for K and V of this dtype."""
    return device.type == "cuda" and dtype in FLASH_DTYPES and torch.backends.cuda.is_flash_attention_available()


def is_gathering_worthwhile(keys: ContiguousKeys, spec: AttentionSpec) -> bool:
    return keys.rows_per_key * spec.num_heads >= MIN_PAIRS_PER_KEY * spec.num_kv_heads


def max_gathered_pages(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """Number of pages of which one layer's K and V take up to MAX_GATHERED_BYTES, or 0 if `flash_attention` does not
    support this attention.
    """
    if spec.soft_cap is not None or spec.head_dim > MAX_FLASH_HEAD_DIM:
        return 0
    return MAX_GATHERED_BYTES // (2 * PAGE_TOKENS * spec.num_kv_heads * spec.head_dim * dtype.itemsize)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: ContiguousKeys,
    spec: AttentionSpec,
    out: torch.Tensor,
) -> None:
    """`reference.attention.contiguous_attention` in torch's FlashAttention kernel (Dao, 2023), which also overwrites
    the rows of `out` between prefills.

    - `q` and `out` `[T, num_heads, head_dim]`, `k` and `v` `[num_keys, num_kv_heads, head_dim]` of bfloat16 or float16.
      Rows may be views into wider rows.
    - `spec` without a soft cap, `head_dim` a multiple of 8 up to 256.

    Reads the ranges of `keys` on the device. The output is allocated by torch before version 2.12, and then copied.
    """
    # A row at position p sees the keys [p - left, p]. With a window, FlashAttention is causal by a right window of 0.
    left = -1 if spec.sliding_window is None else spec.sliding_window - 1
    arguments = (q, k, v, keys.cu_q, keys.cu_k, keys.max_q, keys.max_k, 0.0, left < 0, False)
    named = {"scale": spec.scale, "window_size_left": left, "window_size_right": 0}
    if _WRITES_OUT:
        torch.ops.aten._flash_attention_forward_no_dropout_inplace(out, *arguments, **named)
    else:
        found = torch.ops.aten._flash_attention_forward(*arguments, **named)[0]
        out[: keys.num_rows].copy_(found[: keys.num_rows])


def gather_pages(
    pool: PoolViews, layer: int, pages: torch.Tensor, spec: AttentionSpec, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy one layer's K and V of listed pages into contiguous rows: `k[16 * i + j] = K of token j of pages[i]`.

    `pages` is int32 `[num_listed]`. Returns k and v, `[16 * num_listed, num_kv_heads, head_dim]` of `dtype`, by default
    the pool's. Codes are multiplied by their scales, in float32, and rounded to `dtype`. Every element is written.
    """
    kv = pool.kv_of(spec.num_kv_heads, spec.head_dim)
    scales = pool.scales_of(spec.num_kv_heads, spec.head_dim)
    shape = (2, PAGE_TOKENS * pages.shape[0], spec.num_kv_heads, spec.head_dim)
    rows = torch.empty(shape, dtype=dtype or kv.dtype, device=kv.device)
    block_d = triton.next_power_of_2(spec.head_dim)
    heads = min(triton.next_power_of_2(spec.num_kv_heads), max(1, GATHER_ELEMENTS // (PAGE_TOKENS * block_d)))
    grid = (pages.shape[0], 2, triton.cdiv(spec.num_kv_heads, heads))
    _gather_pages[grid](
        kv, kv if scales is None else scales, pages, rows, rows.stride(0), layer,
        NUM_LAYERS=kv.shape[1], NUM_KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim, PAGE_TOKENS=PAGE_TOKENS,
        NUM_SCALES=0 if scales is None else scales.shape[2], BLOCK_D=block_d, HEADS=heads, num_warps=4,
    )  # fmt: skip
    return rows[0], rows[1]


@triton.jit(do_not_specialize=["layer"])
def _gather_pages(
    kv_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    half_stride: tl.tensor,
    layer: tl.tensor,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Copy K or V of some heads of one page. The grid is `(num_listed, 2, blocks of heads)`."""
    index, half = tl.program_id(0), tl.program_id(1)
    head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None, None]
    token = tl.arange(0, PAGE_TOKENS)[None, :, None]
    d = tl.arange(0, BLOCK_D)[None, None, :]
    is_copied = (head < NUM_KV_HEADS) & (d < HEAD_DIM)
    PLANE: tl.constexpr = NUM_KV_HEADS * PAGE_TOKENS * HEAD_DIM
    page = tl.load(pages_ptr + index).to(tl.int64) * NUM_LAYERS + layer
    source = kv_ptr + (2 * page + half) * PLANE
    values = tl.load(source + (head * PAGE_TOKENS + token) * HEAD_DIM + d, mask=is_copied)
    if NUM_SCALES:
        scales = scales_ptr + page * NUM_SCALES + (half * NUM_KV_HEADS + head) * PAGE_TOKENS + token
        scale = tl.load(scales, mask=head < NUM_KV_HEADS)
        values = (values.to(tl.float32) * scale.to(tl.float32)).to(rows_ptr.dtype.element_ty)
    target = rows_ptr + half.to(tl.int64) * half_stride + index.to(tl.int64) * PLANE
    tl.store(target + (token * NUM_KV_HEADS + head) * HEAD_DIM + d, values, mask=is_copied)
