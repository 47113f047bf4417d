"""The causal convolution and the gated delta rule of hybrid decoders on a GPU.

Both kernels process each sequence's rows in order, so one launch serves decode and prefill, and its grid depends only
on the number of sequences. `DeltaSpec` describes the state of a sequence. Arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.gpu.launches import MAX_GRID_ROWS
from loramux.kernels.gpu.routing import LOG2_E
from loramux.kernels.tables import AttentionBatch, PoolViews

MAX_K_DIM = 256

LN_2 = 0.6931471805599453

TILE_TOKENS = 16
"""Number of rows that one program of the convolution computes together."""

TILE_ELEMENTS = 4096
"""Largest part of a matrix that one program keeps in registers, in elements."""


def check_delta(spec: DeltaSpec, pool: PoolViews) -> None:
    """Raise ValueError, naming the limit, for sizes that the kernels do not support."""
    if spec.k_dim > MAX_K_DIM:
        raise ValueError(f"keys have {spec.k_dim} elements; the GPU's delta rule supports up to {MAX_K_DIM}")
    if spec.input_rows > MAX_GRID_ROWS:
        raise ValueError(
            f"{spec.channels} channels take {spec.input_rows} rows of {spec.k_dim} elements; the GPU's convolution "
            f"supports up to {MAX_GRID_ROWS}"
        )
    spec.num_pages(pool.geometry)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, pool: PoolViews, layer: int, batch: AttentionBatch, spec: DeltaSpec
) -> torch.Tensor:
    """`y` of `reference.delta.convolve` in the dtype of `x`. Rows of `x` may be views into wider rows."""
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    num_sequences, per_page = batch.seq_lens.shape[0], spec.rows_per_page(pool.geometry)
    # Padding rows stay 0.
    y = torch.zeros(x.shape[0], spec.channels, dtype=x.dtype, device=x.device)
    if num_sequences:
        _convolve[(num_sequences, spec.input_rows)](
            x, weight, y, pool.state, batch.cu_q, batch.seq_lens, batch.pages, batch.page_starts, x.stride(0),
            layer * spec.layer_rows + spec.matrix_rows,
            CHANNELS=spec.channels, CONV_LEN=spec.conv_len, K_DIM=spec.k_dim, INPUT_ROWS=spec.input_rows,
            ROWS_PER_PAGE=per_page, PAGE_ELEMENTS=pool.state.shape[1],
            BLOCK=triton.next_power_of_2(spec.k_dim), TAPS=triton.next_power_of_2(max(1, spec.conv_len - 1)),
            TILE=1 if batch.max_q <= 1 else TILE_TOKENS, LOG2_E=LOG2_E, num_warps=4,
        )  # fmt: skip
    return y


@triton.jit
def _row_start(
    pages_ptr: tl.tensor,
    first_page: tl.tensor,
    row: tl.tensor,
    is_read: tl.tensor,
    K_DIM: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
) -> tl.tensor:
    """Pool indices at which rows `row` of a state begin."""
    page = tl.load(pages_ptr + first_page + row // ROWS_PER_PAGE, mask=is_read, other=0)
    return page.to(tl.int64) * PAGE_ELEMENTS + row % ROWS_PER_PAGE * K_DIM


@triton.jit(do_not_specialize=["tail_row"])
def _convolve(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    state_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    page_starts_ptr: tl.tensor,
    x_stride: tl.tensor,
    tail_row: tl.tensor,
    CHANNELS: tl.constexpr,
    CONV_LEN: tl.constexpr,
    K_DIM: tl.constexpr,
    INPUT_ROWS: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    """Convolve K_DIM channels of one sequence, and update their part of the tail.

    The grid is `(sequences, INPUT_ROWS)`.
    """
    sequence, block = tl.program_id(0), tl.program_id(1)
    begin = tl.load(cu_q_ptr + sequence)
    num_rows = tl.load(cu_q_ptr + sequence + 1) - begin
    if num_rows <= 0:
        return
    is_continued = num_rows < tl.load(seq_lens_ptr + sequence)
    first_page = tl.load(page_starts_ptr + sequence)
    lane = tl.arange(0, BLOCK)[None, :]
    channel = block * K_DIM + lane
    is_channel = (lane < K_DIM) & (channel < CHANNELS)
    row = begin.to(tl.int64) * x_stride
    for t in range(0, num_rows, TILE):
        token = t + tl.arange(0, TILE)[:, None]
        y = tl.zeros((TILE, BLOCK), tl.float32)
        for j in tl.static_range(CONV_LEN):
            source = token - (CONV_LEN - 1) + j
            is_new = (source >= 0) & (token < num_rows) & is_channel
            x = tl.load(x_ptr + row + source.to(tl.int64) * x_stride + channel, mask=is_new, other=0.0)
            # Only the first tile reaches into the tail.
            is_old = (source < 0) & (token < num_rows) & is_continued
            tail = tail_row + (CONV_LEN - 1 + source) * INPUT_ROWS + block
            start = _row_start(pages_ptr, first_page, tail, is_old, K_DIM, ROWS_PER_PAGE, PAGE_ELEMENTS)
            kept = tl.load(state_ptr + start + lane, mask=is_old & is_channel, other=0.0)
            weight = tl.load(weight_ptr + j * CHANNELS + channel, mask=is_channel, other=0.0)
            y += weight * (x.to(tl.float32) + kept)
        # The exponential of a negative number cannot overflow.
        decay = tl.exp2(tl.abs(y) * -LOG2_E)
        y = y * tl.where(y < 0, decay, 1.0) / (1 + decay)
        place = (begin + token).to(tl.int64) * CHANNELS + channel
        tl.store(y_ptr + place, y, mask=(token < num_rows) & is_channel)
    tap = tl.arange(0, TAPS)[:, None]
    is_tap = tap < CONV_LEN - 1
    source = num_rows - (CONV_LEN - 1) + tap
    is_new = is_tap & (source >= 0) & is_channel
    x = tl.load(x_ptr + row + source.to(tl.int64) * x_stride + channel, mask=is_new, other=0.0)
    is_old = is_tap & (source < 0) & is_continued
    tail = tail_row + (CONV_LEN - 1 + source) * INPUT_ROWS + block
    start = _row_start(pages_ptr, first_page, tail, is_old, K_DIM, ROWS_PER_PAGE, PAGE_ELEMENTS)
    kept = tl.load(state_ptr + start + lane, mask=is_old & is_channel, other=0.0)
    target = tail_row + tap * INPUT_ROWS + block
    start = _row_start(pages_ptr, first_page, target, is_tap, K_DIM, ROWS_PER_PAGE, PAGE_ELEMENTS)
    # Wait until the program's other threads have read the elements that this thread overwrites.
    tl.debug_barrier()
    tl.store(state_ptr + start + lane, x.to(tl.float32) + kept, mask=is_tap & is_channel)


def delta_rule(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    rates: torch.Tensor,
    pool: PoolViews,
    layer: int,
    batch: AttentionBatch,
    spec: DeltaSpec,
) -> torch.Tensor:
    """`y` of `reference.delta.delta_rule` in the dtype of `qkv`. Rows of `qkv` and `gates` may be views into wider
    rows.
    """
    assert qkv.stride(1) == gates.stride(1) == 1
    assert rates.is_contiguous()
    num_sequences, per_page = batch.seq_lens.shape[0], spec.rows_per_page(pool.geometry)
    # Padding rows stay 0.
    y = torch.zeros(qkv.shape[0], spec.matrix_rows, dtype=qkv.dtype, device=qkv.device)
    block_k = triton.next_power_of_2(spec.k_dim)
    block_v = min(triton.next_power_of_2(spec.v_dim), TILE_ELEMENTS // block_k)
    if num_sequences:
        _delta_rule[(num_sequences, spec.num_v_heads, triton.cdiv(spec.v_dim, block_v))](
            qkv, gates, rates, y, pool.state, batch.cu_q, batch.seq_lens, batch.pages, batch.page_starts,
            qkv.stride(0), gates.stride(0), layer * spec.layer_rows, spec.k_dim**-0.5,
            NUM_K=spec.num_k_heads, NUM_V=spec.num_v_heads, K_DIM=spec.k_dim, V_DIM=spec.v_dim,
            ROWS_PER_PAGE=per_page, PAGE_ELEMENTS=pool.state.shape[1],
            BLOCK_K=block_k, BLOCK_V=block_v, LOG2_E=LOG2_E, LN_2=LN_2, num_warps=4,
        )  # fmt: skip
    return y


@triton.jit
def _unit(x_ptr: tl.tensor, lane: tl.tensor, K_DIM: tl.constexpr) -> tl.tensor:
    """The vector at `x_ptr`, divided by its length."""
    x = tl.load(x_ptr + lane, mask=lane < K_DIM, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x) + 1e-6)


@triton.jit(do_not_specialize=["first_row"])
def _delta_rule(
    qkv_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    y_ptr: tl.tensor,
    state_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    page_starts_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    gates_stride: tl.tensor,
    first_row: tl.tensor,
    q_scale: tl.tensor,
    NUM_K: tl.constexpr,
    NUM_V: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOG2_E: tl.constexpr,
    LN_2: tl.constexpr,
) -> None:
    """Apply the rule to BLOCK_V rows of one matrix, kept in registers. The grid is `(sequences, NUM_V, blocks)`."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(cu_q_ptr + sequence)
    end = tl.load(cu_q_ptr + sequence + 1)
    if end <= begin:
        return
    is_continued = end - begin < tl.load(seq_lens_ptr + sequence)
    first_page = tl.load(page_starts_ptr + sequence)
    lane = tl.arange(0, BLOCK_K)
    out = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_out = out < V_DIM
    start = _row_start(
        pages_ptr, first_page, first_row + head * V_DIM + out, is_out, K_DIM, ROWS_PER_PAGE, PAGE_ELEMENTS
    )
    place = start[:, None] + lane[None, :]
    is_element = is_out[:, None] & (lane < K_DIM)[None, :]
    state = tl.load(state_ptr + place, mask=is_element & is_continued, other=0.0)
    rate = tl.load(rates_ptr + head)
    bias = tl.load(rates_ptr + NUM_V + head)
    key_head = head // (NUM_V // NUM_K)
    row = qkv_ptr + begin.to(tl.int64) * qkv_stride
    gate = gates_ptr + begin.to(tl.int64) * gates_stride + head
    y_row = y_ptr + (begin.to(tl.int64) * NUM_V + head) * V_DIM
    for _ in range(begin, end):
        q = _unit(row + key_head * K_DIM, lane, K_DIM) * q_scale
        k = _unit(row + (NUM_K + key_head) * K_DIM, lane, K_DIM)
        v = tl.load(row + 2 * NUM_K * K_DIM + head * V_DIM + out, mask=is_out, other=0.0).to(tl.float32)
        b = tl.load(gate).to(tl.float32)
        a = tl.load(gate + NUM_V).to(tl.float32) + bias
        # Exponentials of negative numbers cannot overflow.
        power = tl.exp2(tl.abs(b) * -LOG2_E)
        strength = tl.where(b < 0, power, 1.0) / (1 + power)
        softplus = tl.maximum(a, 0.0) + LN_2 * tl.log2(1 + tl.exp2(tl.abs(a) * -LOG2_E))
        state = state * tl.exp2(rate * softplus * LOG2_E)
        change = strength * (v - tl.sum(state * k[None, :], 1))
        state += change[:, None] * k[None, :]
        y = tl.sum(state * q[None, :], 1)
        tl.store(y_row + out, y, mask=is_out)
        row += qkv_stride
        gate += gates_stride
        y_row += NUM_V * V_DIM
    tl.store(state_ptr + place, state, mask=is_element)
