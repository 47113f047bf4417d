"""Applies the rotary embedding and stores K and V in their pages, in one launch on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.launches import overlapping
from loramux.kernels.tables import AttentionBatch, PoolViews


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: PoolViews,
    layer: int,
    batch: AttentionBatch,
    *,
    rotates_k: bool = False,
    pdl: bool = False,
) -> None:
    """Rotate `(a, b)`, the halves of the first `2 * n` elements of each head of q and k, to
    `(a cos - b sin, b cos + a sin)`; store v and the rotated k of row `t` at `batch.kv_slots[t]`.

    - `q` `[T, num_heads, head_dim]` is changed in place. `k` and `v` `[T, num_kv_heads, head_dim]` are only read,
      except that `k` is also rotated in place with `rotates_k`. Without them, nothing is stored. All are float32,
      float16 or bfloat16, and rows may be views into wider rows. Arithmetic is float32.
    - `cos` and `sin` float32 `[T, n]`, contiguous, `2 * n <= head_dim`.
    - The rotated k is rounded to its own dtype. Then k and v are rounded to the pool's dtype (to nearest, ties to even)
      and stored as `[num_kv_heads, page_tokens, head_dim]` in their page, K in the first half of its elements and V in
      the second, as `attention.py` reads them. In a pool of int8 codes, each row of each head gets a scale, as in
      `reference.attention.to_codes`. Rounding `x * (1 / scale)` instead of `x / scale` can change a code by 1 if the
      quotient is nearly halfway between two codes.
    - A row with a negative slot is padding; it is neither rotated nor stored.
    - With `pdl`, the launch may overlap with the previous kernel and with the next one, which must wait for it
      (`launches.py`).
    """
    # If k and v are None, empty views of q take their place. The kernel never reads them.
    keys, values = (q[:, :0] if rows is None else rows for rows in (k, v))
    _, num_q, head_dim = q.shape
    num_kv = keys.shape[1]
    assert q.stride()[1:] == keys.stride()[1:] == values.stride()[1:] == (head_dim, 1)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    num_rows, half = cos.shape
    if num_rows:
        block = triton.next_power_of_2(half)
        kv = pool.kv if num_kv == 0 else pool.kv_of(num_kv, head_dim)
        scales = None if num_kv == 0 else pool.scales_of(num_kv, head_dim)
        _rotate_and_store[(num_rows,)](
            q, keys, values, cos, sin, kv, kv if scales is None else scales, batch.kv_slots, q.stride(0),
            keys.stride(0), values.stride(0), layer,
            NUM_Q=num_q, NUM_KV=num_kv, HEAD_DIM=head_dim, HALF=half,
            NUM_LAYERS=kv.shape[1], PAGE_TOKENS=pool.geometry.page_tokens, ROTATES_K=rotates_k, PDL=pdl, BLOCK=block,
            NUM_SCALES=0 if scales is None else scales.shape[2],
            BLOCK_Q=triton.next_power_of_2(num_q), BLOCK_KV=triton.next_power_of_2(max(1, num_kv)),
            BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
            BLOCK_V=triton.next_power_of_2(max(1, num_kv * head_dim)), BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=min(8, triton.next_power_of_2(max(1, block * num_q // 256))), **overlapping(pdl),
        )  # fmt: skip


@triton.jit
def _rotated(
    row_ptr: tl.tensor,
    place: tl.tensor,
    is_stored: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The two halves of heads, read at `place` and `place + HALF`, rotated, and rounded to the row's dtype."""
    a = tl.load(row_ptr + place, mask=is_stored, other=0.0).to(tl.float32)
    b = tl.load(row_ptr + place + HALF, mask=is_stored, other=0.0).to(tl.float32)
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def _most_bits(values: tl.tensor, is_read: tl.tensor) -> tl.tensor:
    """The bits of the largest magnitude of each row. Their order is that of magnitudes, with NaN above infinity."""
    bits = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.where(is_read, bits, 0), 1)


@triton.jit
def _scale_of(most_bits: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The scale of rows with this largest magnitude, in bfloat16, and its inverse: NaN and 0 if it is not finite."""
    is_finite = most_bits < 0x7F800000
    # At least the smallest normal float32, so that the inverse is finite.
    scale = tl.maximum(most_bits.to(tl.float32, bitcast=True) * (1 / 127), 1.1754943508222875e-38)
    # Round to the nearest bfloat16 here, because the interpreter's conversion truncates, and codes would exceed 127.
    bits = scale.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).to(tl.float32, bitcast=True)
    return tl.where(is_finite, rounded, float("nan")).to(tl.bfloat16), tl.where(is_finite, 1 / rounded, 0.0)


@triton.jit
def _codes_of(values: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """`round(value * inverse)` as int8, to nearest, ties to even."""
    # Floats near 1.5 * 2**23 are integers, so the low bits of the sum are the rounded product.
    rounded = values.to(tl.float32) * inverse[:, None] + 12582912.0
    return rounded.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_store(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    kv_slots_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    layer: tl.tensor,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROTATES_K: tl.constexpr,
    PDL: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Process all heads of one row. The grid is `(T,)`."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        # Let attention look up its sequence and pages. It waits for this grid before it reads q, K or V.
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(kv_slots_ptr + row)
    if slot < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    WIDTH: tl.constexpr = NUM_KV * HEAD_DIM
    PLANE: tl.constexpr = WIDTH * PAGE_TOKENS
    page = (slot // PAGE_TOKENS) * NUM_LAYERS + layer
    # A head's tokens are contiguous in the page.
    keys = kv_ptr + page * (2 * PLANE) + (slot % PAGE_TOKENS) * HEAD_DIM
    i = tl.arange(0, BLOCK)[None, :]
    cos = tl.load(cos_ptr + row * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + i, mask=i < HALF, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    head = tl.arange(0, BLOCK_Q)[:, None]
    is_q = (head < NUM_Q) & (i < HALF)
    q_row = q_ptr + row * q_stride
    a, b = _rotated(q_row, head * HEAD_DIM + i, is_q, cos, sin, HALF)
    tl.store(q_row + head * HEAD_DIM + i, a, mask=is_q)
    tl.store(q_row + head * HEAD_DIM + i + HALF, b, mask=is_q)

    if NUM_KV > 0:
        head = tl.arange(0, BLOCK_KV)[:, None]
        is_k = (head < NUM_KV) & (i < HALF)
        k_row = k_ptr + row * k_stride
        a, b = _rotated(k_row, head * HEAD_DIM + i, is_k, cos, sin, HALF)
        stored = keys + head * (PAGE_TOKENS * HEAD_DIM) + i
        if ROTATES_K:
            tl.store(k_row + head * HEAD_DIM + i, a, mask=is_k)
            tl.store(k_row + head * HEAD_DIM + i + HALF, b, mask=is_k)
        if 2 * HALF < HEAD_DIM:
            d = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            is_rest = (head < NUM_KV) & (d < HEAD_DIM)
            rest = tl.load(k_row + head * HEAD_DIM + d, mask=is_rest, other=0.0)
        if NUM_SCALES:
            k_head = tl.arange(0, BLOCK_KV)
            scales = scales_ptr + page * NUM_SCALES + k_head * PAGE_TOKENS + slot % PAGE_TOKENS
            most = tl.maximum(_most_bits(a, is_k), _most_bits(b, is_k))
            if 2 * HALF < HEAD_DIM:
                most = tl.maximum(most, _most_bits(rest, is_rest))
            scale, inverse = _scale_of(most)
            tl.store(scales, scale, mask=k_head < NUM_KV)
            a, b = _codes_of(a, inverse), _codes_of(b, inverse)
            if 2 * HALF < HEAD_DIM:
                rest = _codes_of(rest, inverse)
        tl.store(stored, a, mask=is_k)
        tl.store(stored + HALF, b, mask=is_k)
        if 2 * HALF < HEAD_DIM:
            tl.store(keys + head * (PAGE_TOKENS * HEAD_DIM) + d, rest, mask=is_rest)

        if NUM_SCALES:
            d = tl.arange(0, BLOCK_D)[None, :]
            is_v = (head < NUM_KV) & (d < HEAD_DIM)
            v = tl.load(v_ptr + row * v_stride + head * HEAD_DIM + d, mask=is_v, other=0.0)
            scale, inverse = _scale_of(_most_bits(v, is_v))
            tl.store(scales + NUM_KV * PAGE_TOKENS, scale, mask=k_head < NUM_KV)
            tl.store(keys + PLANE + head * (PAGE_TOKENS * HEAD_DIM) + d, _codes_of(v, inverse), mask=is_v)
        else:
            column = tl.arange(0, BLOCK_V)
            is_v = column < WIDTH
            v = tl.load(v_ptr + row * v_stride + column, mask=is_v)
            values = keys + PLANE + column // HEAD_DIM * (PAGE_TOKENS * HEAD_DIM) + column % HEAD_DIM
            tl.store(values, v, mask=is_v)
