"""The causal convolution and the gated delta rule of hybrid decoders on a GPU.

Launches depend only on shapes and `AttentionBatch.max_q`, so a captured graph can be replayed with other sequences.
`DeltaSpec` describes the state of a sequence. Arithmetic is float32.

Short sequences, such as those in decode, apply the rule to one row after another. Longer ones apply it to chunks of
CHUNK_ROWS rows (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, with
the decay of "Gated Delta Networks", 2024). Let `S` be the matrix before a chunk, and `d[t]` the product of the chunk's
decays up to row `t`. Substituting each row's matrix into the next row's gives, for all rows of the chunk at once:

    A[t, s] = strength[t] * d[t] / d[s] * (k[t] · k[s]) if s < t, else 0
    P[t, s] = d[t] / d[s] * (q[t] · k[s]) / sqrt(k_dim) if s <= t, else 0
    T = (I + A)⁻¹ diag(strength)
    U = T (V - diag(d) K Sᵀ)
    Y = diag(d) Q Sᵀ / sqrt(k_dim) + P U
    S := d[last] S + Uᵀ diag(d[last] / d) K

T and P do not depend on `S`, so `_prepare_chunks` computes those of all chunks in parallel. `_apply_chunks` then visits
the chunks of each sequence in order, with five small products each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.gpu.addresses import dot_dtype
from loramux.kernels.gpu.launches import MAX_GRID_ROWS
from loramux.kernels.gpu.routing import LOG2_E
from loramux.kernels.tables import AttentionBatch, PoolViews

MAX_K_DIM = 256

LN_2 = 0.6931471805599453

TILE_TOKENS = 16
"""Number of rows that one program of the convolution computes together."""

TILE_ELEMENTS = 4096
"""Largest part of a matrix that one program keeps in registers, in elements."""

CHUNK_ROWS = 32
"""Number of rows in a chunk."""

MIN_CHUNK_ROWS = 16
"""Minimum number of rows for which a sequence uses chunks."""

CHUNK_COLUMNS = 16
"""Number of rows of a matrix that one program of `_apply_chunks` updates."""

CHUNK_SLICE = 32
"""Number of elements of each key that a chunk's programs multiply at a time. More would not fit into registers."""


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
    tile = 1 if batch.max_q <= 1 else TILE_TOKENS
    num_tiles = num_sequences if tile == 1 else _num_slots(x.shape[0], num_sequences, tile)
    if num_sequences:
        _convolve[(num_tiles, spec.input_rows)](
            x, weight, y, pool.state, batch.cu_q, batch.seq_lens, batch.pages, batch.page_starts, x.stride(0),
            num_sequences, layer * spec.layer_rows + spec.matrix_rows,
            CHANNELS=spec.channels, CONV_LEN=spec.conv_len, K_DIM=spec.k_dim, INPUT_ROWS=spec.input_rows,
            ROWS_PER_PAGE=per_page, PAGE_ELEMENTS=pool.state.shape[1],
            BLOCK=triton.next_power_of_2(spec.k_dim), TAPS=triton.next_power_of_2(max(1, spec.conv_len - 1)),
            TILE=tile, LOG2_E=LOG2_E, num_warps=4,
        )  # fmt: skip
    return y


def _num_slots(num_rows: int, num_sequences: int, size: int) -> int:
    """The number of slots that `_slot_of` divides among the parts of up to `size` rows of all sequences."""
    return num_rows // size + num_sequences


@triton.jit
def _slot_of(slot: tl.tensor, cu_q_ptr: tl.tensor, num_sequences: tl.tensor, SIZE: tl.constexpr) -> Any:
    """The sequence of a slot, its first row in the batch, its number of rows, and the slot's first row in the sequence.

    Part `j` of sequence `i`, rows `[j * SIZE, (j + 1) * SIZE)`, has slot `cu_q[i] // SIZE + i + j`. No two parts share
    a slot. In a slot without a part, the slot's first row is not below the sequence's number of rows.
    """
    low = slot * 0
    high = low + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(cu_q_ptr + middle) // SIZE + middle > slot
        high = tl.where(is_later, middle, high)
        low = tl.where(is_later, low, middle)
    begin = tl.load(cu_q_ptr + low)
    num_rows = tl.load(cu_q_ptr + low + 1) - begin
    return low, begin, num_rows, (slot - begin // SIZE - low) * SIZE


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


@triton.jit(do_not_specialize=["num_sequences", "tail_row"])
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
    num_sequences: tl.tensor,
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
    """Convolve K_DIM channels of TILE rows of one sequence. The program of the first rows also updates the tail.

    The grid is `(slots, INPUT_ROWS)`, where slots are those of `_slot_of`. With a TILE of 1, every sequence has at most
    one row, and the grid is `(sequences, INPUT_ROWS)`.
    """
    block = tl.program_id(1)
    if TILE == 1:
        sequence = tl.program_id(0)
        begin = tl.load(cu_q_ptr + sequence)
        num_rows = tl.load(cu_q_ptr + sequence + 1) - begin
        first = 0
    else:
        sequence, begin, num_rows, first = _slot_of(tl.program_id(0), cu_q_ptr, num_sequences, TILE)
    if first >= num_rows:
        return
    is_continued = num_rows < tl.load(seq_lens_ptr + sequence)
    first_page = tl.load(page_starts_ptr + sequence)
    lane = tl.arange(0, BLOCK)[None, :]
    channel = block * K_DIM + lane
    is_channel = (lane < K_DIM) & (channel < CHANNELS)
    row = begin.to(tl.int64) * x_stride
    token = first + tl.arange(0, TILE)[:, None]
    y = tl.zeros((TILE, BLOCK), tl.float32)
    for j in tl.static_range(CONV_LEN):
        source = token - (CONV_LEN - 1) + j
        is_new = (source >= 0) & (token < num_rows) & is_channel
        x = tl.load(x_ptr + row + source.to(tl.int64) * x_stride + channel, mask=is_new, other=0.0)
        # Only the first rows reach into the tail.
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
    if first > 0:
        return
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
    if not num_sequences:
        return y
    block_k = triton.next_power_of_2(spec.k_dim)
    block_v = min(triton.next_power_of_2(spec.v_dim), TILE_ELEMENTS // block_k)
    sizes = {"NUM_K": spec.num_k_heads, "NUM_V": spec.num_v_heads, "K_DIM": spec.k_dim, "LOG2_E": LOG2_E, "LN_2": LN_2}
    places = {"V_DIM": spec.v_dim, "ROWS_PER_PAGE": per_page, "PAGE_ELEMENTS": pool.state.shape[1]}
    first_row, q_scale = layer * spec.layer_rows, spec.k_dim**-0.5
    _delta_rule[(num_sequences, spec.num_v_heads, triton.cdiv(spec.v_dim, block_v))](
        qkv, gates, rates, y, pool.state, batch.cu_q, batch.seq_lens, batch.pages, batch.page_starts,
        qkv.stride(0), gates.stride(0), first_row, q_scale,
        **sizes, **places, MAX_ROWS=MIN_CHUNK_ROWS - 1, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    if batch.max_q < MIN_CHUNK_ROWS:
        return y
    tile = {"CHUNK": CHUNK_ROWS, "SLICE": CHUNK_SLICE, "MIN_ROWS": MIN_CHUNK_ROWS}
    num_slots, chunk = _num_slots(qkv.shape[0], num_sequences, CHUNK_ROWS), (CHUNK_ROWS, CHUNK_ROWS)
    matrices = torch.empty(num_slots, spec.num_v_heads, 2, *chunk, dtype=torch.float32, device=qkv.device)
    factors = torch.empty(num_slots, spec.num_v_heads, 4, CHUNK_ROWS, dtype=torch.float32, device=qkv.device)
    _prepare_chunks[(num_slots, spec.num_v_heads)](
        qkv, gates, rates, matrices, factors, batch.cu_q, qkv.stride(0), gates.stride(0), num_sequences, q_scale,
        **sizes, **tile, LEVELS=CHUNK_ROWS.bit_length() - 1,
        DOT_DTYPE=dot_dtype(qkv.dtype, qkv.dtype), num_warps=2,
    )  # fmt: skip
    _apply_chunks[(num_sequences, spec.num_v_heads, triton.cdiv(spec.v_dim, CHUNK_COLUMNS))](
        qkv, matrices, factors, y, pool.state, batch.cu_q, batch.seq_lens, batch.pages, batch.page_starts,
        qkv.stride(0), first_row,
        NUM_K=spec.num_k_heads, NUM_V=spec.num_v_heads, K_DIM=spec.k_dim, **places,
        **tile, BLOCK_V=CHUNK_COLUMNS, num_warps=2, num_stages=2,
    )  # fmt: skip
    return y


@triton.jit
def _unit(x_ptr: tl.tensor, lane: tl.tensor, K_DIM: tl.constexpr) -> tl.tensor:
    """The vector at `x_ptr`, divided by its length."""
    x = tl.load(x_ptr + lane, mask=lane < K_DIM, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x) + 1e-6)


@triton.jit
def _gate_values(b: tl.tensor, a: tl.tensor, rate: tl.tensor, LOG2_E: tl.constexpr, LN_2: tl.constexpr) -> Any:
    """The strength and the base-2 logarithm of the decay of rows with the gates `b` and `a`, after adding the bias."""
    # Exponentials of negative numbers cannot overflow.
    power = tl.exp2(tl.abs(b) * -LOG2_E)
    softplus = tl.maximum(a, 0.0) + LN_2 * tl.log2(1 + tl.exp2(tl.abs(a) * -LOG2_E))
    return tl.where(b < 0, power, 1.0) / (1 + power), rate * softplus * LOG2_E


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
    MAX_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOG2_E: tl.constexpr,
    LN_2: tl.constexpr,
) -> None:
    """Apply the rule to BLOCK_V rows of one matrix, kept in registers. The grid is `(sequences, NUM_V, blocks)`.

    Programs of sequences without rows, and of sequences with more than MAX_ROWS rows, end immediately.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(cu_q_ptr + sequence)
    end = tl.load(cu_q_ptr + sequence + 1)
    if (end <= begin) | (end - begin > MAX_ROWS):
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
        strength, log_decay = _gate_values(b, a, rate, LOG2_E, LN_2)
        state = state * tl.exp2(log_decay)
        change = strength * (v - tl.sum(state * k[None, :], 1))
        state += change[:, None] * k[None, :]
        y = tl.sum(state * q[None, :], 1)
        tl.store(y_row + out, y, mask=is_out)
        row += qkv_stride
        gate += gates_stride
        y_row += NUM_V * V_DIM
    tl.store(state_ptr + place, state, mask=is_element)


@triton.jit(do_not_specialize=["num_sequences"])
def _prepare_chunks(
    qkv_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    matrices_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    gates_stride: tl.tensor,
    num_sequences: tl.tensor,
    q_scale: tl.tensor,
    NUM_K: tl.constexpr,
    NUM_V: tl.constexpr,
    K_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    SLICE: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    LOG2_E: tl.constexpr,
    LN_2: tl.constexpr,
) -> None:
    """Compute one chunk's T and P, and the factors of its rows. The grid is `(slots, NUM_V)`, see `_slot_of`.

    The factors are d, d / |k|, d / (|q| sqrt(k_dim)), and d[last] / d / |k|. Rows after the sequence's end have a
    strength of 0 and a decay of 1, so they do not change the state.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    _, begin, num_rows, first = _slot_of(slot, cu_q_ptr, num_sequences, CHUNK)
    if (num_rows < MIN_ROWS) | (first >= num_rows):
        return
    is_row = first + tl.arange(0, CHUNK) < num_rows
    row = (begin + first + tl.arange(0, CHUNK)).to(tl.int64)
    x = qkv_ptr + row[:, None] * qkv_stride + head // (NUM_V // NUM_K) * K_DIM
    q_square, k_square = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    similar, attention = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for d in range(0, K_DIM, SLICE):
        lane = d + tl.arange(0, SLICE)[None, :]
        is_element = is_row[:, None] & (lane < K_DIM)
        q = tl.load(x + lane, mask=is_element, other=0.0).to(DOT_DTYPE)
        k = tl.load(x + NUM_K * K_DIM + lane, mask=is_element, other=0.0).to(DOT_DTYPE)
        q_square += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
        k_square += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
        similar = tl.dot(k, tl.trans(k), similar, input_precision="tf32x3")
        attention = tl.dot(q, tl.trans(k), attention, input_precision="tf32x3")
    q_factor = tl.rsqrt(q_square + 1e-6) * q_scale
    k_factor = tl.rsqrt(k_square + 1e-6)
    b = tl.load(gates_ptr + row * gates_stride + head, mask=is_row, other=0.0).to(tl.float32)
    a = tl.load(gates_ptr + row * gates_stride + NUM_V + head, mask=is_row, other=0.0).to(tl.float32)
    a += tl.load(rates_ptr + NUM_V + head)
    strength, log_decay = _gate_values(b, a, tl.load(rates_ptr + head), LOG2_E, LN_2)
    strength = tl.where(is_row, strength, 0.0)
    log_decay = tl.where(is_row, log_decay, 0.0)

    at, earlier = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    # Adding the decays between two rows is more exact than subtracting two long sums, and cannot overflow.
    log_between = tl.cumsum(tl.where(at > earlier, log_decay[:, None], 0.0), 0)
    between = tl.exp2(log_between)
    attention *= q_factor[:, None] * k_factor[None, :]
    matrix = matrices_ptr + (slot.to(tl.int64) * NUM_V + head) * (2 * CHUNK * CHUNK) + at * CHUNK + earlier
    tl.store(matrix + CHUNK * CHUNK, tl.where(at >= earlier, between * attention, 0.0))
    since_begin = tl.exp2(tl.cumsum(log_decay, 0))
    until_end = tl.exp2(tl.sum(tl.where(at == CHUNK - 1, log_between, 0.0), 0))
    factor = factors_ptr + (slot.to(tl.int64) * NUM_V + head) * (4 * CHUNK) + tl.arange(0, CHUNK)
    tl.store(factor, since_begin)
    tl.store(factor + CHUNK, since_begin * k_factor)
    tl.store(factor + 2 * CHUNK, since_begin * q_factor)
    tl.store(factor + 3 * CHUNK, until_end * k_factor)

    # Invert I + A by blocks: the inverse of [[X, 0], [B, Y]] is [[X', 0], [-Y' B X', Y']]. Powers of A would need fewer
    # products, but they lose all digits if keys repeat.
    similar *= k_factor[:, None] * k_factor[None, :]
    coupling = tl.where(at > earlier, strength[:, None] * between * similar, 0.0)
    inverse = tl.where(at == earlier, 1.0, 0.0) - tl.where(at // 2 == earlier // 2, coupling, 0.0)
    for level in range(1, LEVELS):
        is_joined = (at >> (level + 1) == earlier >> (level + 1)) & (at >> level > earlier >> level)
        joined = tl.dot(inverse, tl.where(is_joined, coupling, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(joined, inverse, input_precision="tf32x3")
    tl.store(matrix, inverse * strength[None, :])


@triton.jit(do_not_specialize=["first_row"])
def _apply_chunks(
    qkv_ptr: tl.tensor,
    matrices_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    y_ptr: tl.tensor,
    state_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    page_starts_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    first_row: tl.tensor,
    NUM_K: tl.constexpr,
    NUM_V: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SLICE: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Apply the rule to BLOCK_V rows of one matrix, chunk by chunk. The grid is `(sequences, NUM_V, blocks)`.

    Programs of sequences with fewer than MIN_ROWS rows end immediately.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(cu_q_ptr + sequence)
    num_rows = tl.load(cu_q_ptr + sequence + 1) - begin
    if num_rows < MIN_ROWS:
        return
    is_continued = num_rows < tl.load(seq_lens_ptr + sequence)
    first_page = tl.load(page_starts_ptr + sequence)
    out = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_out = out < V_DIM
    start = _row_start(
        pages_ptr, first_page, first_row + head * V_DIM + out, is_out, K_DIM, ROWS_PER_PAGE, PAGE_ELEMENTS
    )
    at = tl.arange(0, CHUNK)
    key = NUM_K * K_DIM + head // (NUM_V // NUM_K) * K_DIM
    value = 2 * NUM_K * K_DIM + head * V_DIM
    part = (begin // CHUNK + sequence).to(tl.int64) * NUM_V + head
    for first in range(0, num_rows, CHUNK):
        is_row = first + at < num_rows
        row = (begin + first + at).to(tl.int64)
        x = qkv_ptr + row[:, None] * qkv_stride
        factor = factors_ptr + part * (4 * CHUNK) + at
        matrix = matrices_ptr + part * (2 * CHUNK * CHUNK) + at[:, None] * CHUNK + at[None, :]
        # The matrix stays in the pool, and is read and written in slices. It would take too many registers.
        has_state = is_continued | (first > 0)
        known, y = tl.zeros((CHUNK, BLOCK_V), tl.float32), tl.zeros((CHUNK, BLOCK_V), tl.float32)
        for d in range(0, K_DIM, SLICE):
            lane = d + tl.arange(0, SLICE)[None, :]
            is_known = is_out[:, None] & (lane < K_DIM) & has_state
            state = tl.trans(tl.load(state_ptr + start[:, None] + lane, mask=is_known, other=0.0))
            is_element = is_row[:, None] & (lane < K_DIM)
            k = tl.load(x + key + lane, mask=is_element, other=0.0).to(tl.float32)
            q = tl.load(x + key - NUM_K * K_DIM + lane, mask=is_element, other=0.0).to(tl.float32)
            known = tl.dot(k, state, known, input_precision="tf32x3")
            y = tl.dot(q, state, y, input_precision="tf32x3")
        is_value = is_row[:, None] & is_out[None, :]
        v = tl.load(x + value + out[None, :], mask=is_value, other=0.0).to(tl.float32)
        known *= tl.load(factor + CHUNK)[:, None]
        change = tl.dot(tl.load(matrix), v - known, input_precision="tf32x3")
        y *= tl.load(factor + 2 * CHUNK)[:, None]
        y = tl.dot(tl.load(matrix + CHUNK * CHUNK), change, y, input_precision="tf32x3")
        tl.store(y_ptr + (row * NUM_V + head)[:, None] * V_DIM + out[None, :], y, mask=is_value)
        kept = tl.trans(change * tl.load(factor + 3 * CHUNK)[:, None])
        decay = tl.load(factors_ptr + part * (4 * CHUNK) + CHUNK - 1)
        for d in range(0, K_DIM, SLICE):
            lane = d + tl.arange(0, SLICE)[None, :]
            is_element = is_out[:, None] & (lane < K_DIM)
            state = tl.load(state_ptr + start[:, None] + lane, mask=is_element & has_state, other=0.0)
            k = tl.load(x + key + lane, mask=is_row[:, None] & (lane < K_DIM), other=0.0).to(tl.float32)
            state = tl.dot(kept, k, state * decay, input_precision="tf32x3")
            # Wait until the program's other threads have read the elements that this thread overwrites.
            tl.debug_barrier()
            tl.store(state_ptr + start[:, None] + lane, state, mask=is_element)
        tl.debug_barrier()
        part += NUM_V
