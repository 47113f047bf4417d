"""Attention over paged K and V on a GPU: ragged prefill after a prefix, and decode split over the context.

In a page, K and V are both `[num_kv_heads, 16, head_dim]`, K in the first half of the elements and V in the second. One
token's K or V of a head is contiguous, so loads coalesce and feed `tl.dot` directly. On a CPU, in contrast, K is
transposed. `rotate_and_store.py` writes the GPU layout.

K and V can be int8 codes. Codes are exact in the dtype of q, so they are multiplied as they are. The scales of the keys
then multiply the scores, and the scales of the values multiply the weights. Both products are float32, but the scaled
weights are rounded to the dtype of q, like weights without scales.

One kernel handles both prefill and decode. Each program processes up to `block_m` (query, head) pairs that share one KV
head, and iterates over tiles of keys with an online softmax (Milakov and Gimelshein, 2018). To fill the device, and to
keep one long context from delaying a step, several programs can share a context. They write partial results to a
workspace, and the program that finishes last combines them (Flash-Decoding; Dao et al., 2023).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.attention_plan import PAGE_TOKENS, PARTIAL_PAD, AttentionPlan
from loramux.kernels.gpu.launches import overlapping
from loramux.kernels.tables import AttentionBatch, AttentionSpec, PoolViews

COMBINED_ELEMENTS = 2048
"""Number of elements of partial results that a program reads at once when it combines them."""

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if these kernels run in Triton's interpreter, where `tl.dot` cannot multiply bfloat16."""

_DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def paged_attention(
    q: torch.Tensor,
    pool: PoolViews,
    layer: int,
    batch: AttentionBatch,
    spec: AttentionSpec,
    plan: AttentionPlan,
    workspace: torch.Tensor,
    counters: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """`out[t] = softmax(soft_cap(q[t] kᵀ * scale) + mask) v` over the context of row `t`'s sequence.

    `q` and `out` are `[T, num_heads, head_dim]` of float32, float16 or bfloat16, and `pool.kv` has one of these dtypes,
    or int8 with `pool.kv_scales`. Sums are float32. Rows may be views into wider rows. Head `h` reads KV head
    `h // (num_heads // num_kv_heads)`.
    The query at position `p` sees keys `[0, p]` or, with a window, `[max(0, p - sliding_window + 1), p]`. `sinks`,
    float32 `[num_heads]`, contains for each head the score of an additional key that has no value.

    `workspace` is float32 with at least `plan.workspace_elements(...)` elements. Its contents do not matter before or
    after the call. `counters` is int32 with at least `plan.num_counters(...)` elements, which are zero before and after
    the call. Calls that share it must not overlap.

    The batch is read on the device, so a captured graph can be replayed after the batch's tensors are overwritten in
    place. Sequences without query rows, and rows that belong to no sequence, are padding and are skipped. No page or
    pool element is read beyond the end of a context or before the first key that any of its rows sees.
    `check_attention` defines what is supported. With `pdl`, the launch may overlap with the previous kernel
    (`launches.py`).
    """
    group_size = spec.num_heads // spec.num_kv_heads
    num_tokens, num_sequences = q.shape[0], batch.seq_lens.shape[0]
    assert q.stride()[1:] == out.stride()[1:] == (spec.head_dim, 1)
    kv = pool.kv_of(spec.num_kv_heads, spec.head_dim)
    scales = pool.scales_of(spec.num_kv_heads, spec.head_dim)
    assert workspace.dtype is torch.float32
    assert sinks is None or (sinks.dtype is torch.float32 and sinks.is_contiguous())
    assert workspace.numel() >= plan.workspace_elements(num_tokens, num_sequences, spec)
    assert counters.dtype is torch.int32
    assert counters.numel() >= plan.num_counters(num_tokens, num_sequences, spec)
    for tiling in (plan.short, plan.long):
        if tiling is None or num_sequences == 0:
            continue
        block_q, block_d = tiling.block_q(group_size), max(16, triton.next_power_of_2(spec.head_dim))
        num_pairs = min(triton.next_power_of_2(block_q * group_size), COMBINED_ELEMENTS // block_d)
        # Without sinks or scales, any pointer will do, because the kernel does not read it.
        sinks_or_any = workspace if sinks is None else sinks
        scales_or_any = workspace if scales is None else scales
        _attend[(tiling.num_tiles(num_tokens, num_sequences, group_size), spec.num_kv_heads, tiling.num_splits)](
            q, kv, scales_or_any, out, workspace, counters, sinks_or_any, batch.cu_q, batch.seq_lens, batch.pages,
            batch.page_starts,
            q.stride(0), out.stride(0), num_sequences, layer,
            spec.scale / spec.soft_cap if spec.soft_cap else spec.scale * math.log2(math.e),
            GROUP=group_size, HEAD_DIM=spec.head_dim, BLOCK_D=block_d, BLOCK_Q=block_q, TILE_N=tiling.tile_n,
            MIN_ROWS=tiling.min_rows, MAX_ROWS=tiling.max_rows, WINDOW=spec.sliding_window or 0,
            PARTIAL_PAD=PARTIAL_PAD, MIN_TILES=tiling.min_tiles,
            NUM_LAYERS=kv.shape[1], NUM_KV_HEADS=spec.num_kv_heads, PAGE_TOKENS=PAGE_TOKENS,
            NUM_SCALES=0 if scales is None else scales.shape[2],
            BLOCK_M=tiling.block_m, SOFT_CAP=(spec.soft_cap or 0.0) * math.log2(math.e),
            IS_SPLIT=tiling.num_splits > 1, HAS_SINKS=sinks is not None, PDL=pdl,
            PAIRS=num_pairs, BLOCK_SPLITS=COMBINED_ELEMENTS // (num_pairs * block_d),
            DOT_TYPE=tl.float32 if IS_INTERPRETED and q.dtype is torch.bfloat16 else _DOT_TYPES[q.dtype],
            num_warps=tiling.num_warps, num_stages=tiling.num_stages, **overlapping(pdl),
        )  # fmt: skip


@triton.jit
def _tile_of(
    tile: tl.tensor,
    cu_q_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_sequences: tl.tensor,
    BLOCK_Q: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
) -> Any:
    """A tile's sequence, first query row, number of rows (0: nothing to do) and first position.

    If sequences can have several tiles, sequence `i` owns tiles `[cu_q[i] // BLOCK_Q + i, cu_q[i + 1] // BLOCK_Q + i]`.
    These tiles cover all of the sequence's rows. Surplus tiles have nothing to do.
    """
    if MAX_ROWS == BLOCK_Q:
        sequence = tile
        block = 0
    else:
        started = 0
        for start in range(0, num_sequences, 256):
            index = start + tl.arange(0, 256)
            is_sequence = index < num_sequences
            first_tile = tl.load(cu_q_ptr + index, mask=is_sequence, other=0) // BLOCK_Q + index
            started += tl.sum((is_sequence & (first_tile <= tile)).to(tl.int32), 0)
        sequence = started - 1
        block = tile - tl.load(cu_q_ptr + sequence) // BLOCK_Q - sequence
    row = tl.load(cu_q_ptr + sequence)
    num_rows = tl.load(cu_q_ptr + sequence + 1) - row
    if MAX_ROWS != BLOCK_Q:
        # A sequence's last rows see the most keys, so they start first.
        block = (num_rows + BLOCK_Q - 1) // BLOCK_Q - 1 - block
    is_work = (num_rows >= MIN_ROWS) & (num_rows <= MAX_ROWS) & (block >= 0)
    num_queries = tl.where(is_work, tl.minimum(num_rows - block * BLOCK_Q, BLOCK_Q), 0)
    position = tl.load(seq_lens_ptr + sequence) - num_rows + block * BLOCK_Q
    return sequence, row + block * BLOCK_Q, num_queries, position


@triton.jit
def _keys_of(
    position: tl.tensor,
    num_queries: tl.tensor,
    num_splits: tl.tensor,
    TILE_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
) -> Any:
    """The key tiles `[first, last)` that at least one query row sees, and the number of these tiles per split."""
    first = 0
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0) // TILE_N
    last = (position + num_queries + TILE_N - 1) // TILE_N
    return first, last, tl.maximum((last - first + num_splits - 1) // num_splits, MIN_TILES)


@triton.jit
def _walk(
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    kv_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    position: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first_tile: tl.tensor,
    last_tile: tl.tensor,
    score_scale: tl.tensor,
    IS_MASKED: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_N: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> Any:
    """Fold key tiles `[first_tile, last_tile)` into the running maximum, sum and weighted values.

    At least one row sees each key in `[begin, end)`, and other keys are not read. Without `IS_MASKED`, every row sees
    every key of these tiles. If `SCALE_STRIDE` is not 0, K and V are codes. The scale of a value is `VALUE_SCALES`
    after that of its key.
    """
    d = tl.arange(0, BLOCK_D)
    for tile in range(first_tile, last_tile):
        key = tile * TILE_N + tl.arange(0, TILE_N)
        is_loaded = (d < HEAD_DIM)[None, :]
        if IS_MASKED:
            is_seen = key < end
            if WINDOW:
                # Pages before the window may belong to another sequence or not be listed.
                is_seen = is_seen & (key >= begin)
            is_loaded = is_loaded & is_seen[:, None]
            page = tl.load(pages_ptr + key // PAGE_TOKENS, mask=is_seen, other=0)
        else:
            page = tl.load(pages_ptr + key // PAGE_TOKENS)
        # A pool can easily exceed 2^31 elements.
        place = page.to(tl.int64) * PAGE_STRIDE + (key % PAGE_TOKENS) * HEAD_DIM
        element = kv_ptr + place[:, None] + d[None, :]
        k = tl.load(element, mask=is_loaded, other=0).to(DOT_TYPE)  # [TILE_N, BLOCK_D]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
        if SCALE_STRIDE:
            scale = scales_ptr + page.to(tl.int64) * SCALE_STRIDE + key % PAGE_TOKENS
            if IS_MASKED:
                k_scale = tl.load(scale, mask=is_seen, other=0)
                v_scale = tl.load(scale + VALUE_SCALES, mask=is_seen, other=0)
            else:
                k_scale = tl.load(scale)
                v_scale = tl.load(scale + VALUE_SCALES)
            scores *= k_scale.to(tl.float32)[None, :]
        if SOFT_CAP > 0:
            # Compute tanh from the exponential of a negative number, which cannot overflow.
            decay = tl.exp2(tl.abs(scores) * (-2 * 1.4426950408889634))
            bent = (1 - decay) / (1 + decay) * SOFT_CAP
            scores = tl.where(scores < 0, -bent, bent)
        if IS_MASKED:
            is_visible = key[None, :] <= position[:, None]
            if WINDOW:
                is_visible = is_visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(is_visible, scores, float("-inf"))
        # The running maximum starts at a finite number, so that a row that has not seen a key yet never computes inf -
        # inf.
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        decline = tl.exp2(largest - new_largest)
        total = total * decline + tl.sum(weights, 1)
        v = tl.load(element + VALUES, mask=is_loaded, other=0).to(DOT_TYPE)
        if SCALE_STRIDE:
            weights *= v_scale.to(tl.float32)[None, :]
        acc = tl.dot(weights.to(DOT_TYPE), v, acc * decline[:, None], input_precision="ieee")
        largest = new_largest
    return acc, largest, total


@triton.jit(do_not_specialize=["num_sequences", "layer"])
def _attend(
    q_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    page_starts_ptr: tl.tensor,
    q_stride: tl.tensor,
    out_stride: tl.tensor,
    num_sequences: tl.tensor,
    layer: tl.tensor,
    score_scale: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    PARTIAL_PAD: tl.constexpr,
    MIN_TILES: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """Process one tile of one KV head's query rows against one split of the keys.

    The grid is `(tiles, num_kv_heads, splits)`. Writes `out` or, when split, `partial[line, head, split]`: `HEAD_DIM`
    values of the split's attention, then the base-2 logarithm of its sum of exponentials. A line is a token or, if each
    sequence has only one tile, a row of a tile. If only one split has keys, it writes `out`. Otherwise, the program
    that counts as the last in `counters[tile, kv_head]` combines the partial results, and resets the counter.
    """
    kv_head, split, num_splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    sequence, row, num_queries, first_position = _tile_of(
        tl.program_id(0), cu_q_ptr, seq_lens_ptr, num_sequences, BLOCK_Q, MIN_ROWS, MAX_ROWS
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_queries == 0:
        return
    first_tile, last_tile, split_tiles = _keys_of(first_position, num_queries, num_splits, TILE_N, MIN_TILES, WINDOW)
    num_used = (last_tile - first_tile + split_tiles - 1) // split_tiles
    # If only one split has keys, its result needs no combining.
    is_only = num_used <= 1
    first_tile += split * split_tiles
    if first_tile >= last_tile:
        return
    last_tile = tl.minimum(last_tile, first_tile + split_tiles)

    pair = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = pair // GROUP
    token = (row + query).to(tl.int64)
    column = (kv_head * GROUP + pair % GROUP)[:, None] * HEAD_DIM + d[None, :]
    is_stored = (query < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (token * q_stride)[:, None] + column, mask=is_stored, other=0.0).to(DOT_TYPE)
    position = first_position + query

    PLANE: tl.constexpr = NUM_KV_HEADS * PAGE_TOKENS * HEAD_DIM
    kv_ptr += layer.to(tl.int64) * (2 * PLANE) + kv_head * (PAGE_TOKENS * HEAD_DIM)
    SCALE_STRIDE: tl.constexpr = NUM_LAYERS * NUM_SCALES
    VALUE_SCALES: tl.constexpr = NUM_KV_HEADS * PAGE_TOKENS
    scales_ptr += layer.to(tl.int64) * NUM_SCALES + kv_head * PAGE_TOKENS
    pages_ptr += tl.load(page_starts_ptr + sequence)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    end = first_position + num_queries
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    masked_tile = first_tile
    if WINDOW == 0 and BLOCK_Q > 1:
        # All rows see the keys up to the first row's own position, so tiles with only such keys need no mask.
        masked_tile = tl.minimum(tl.maximum((first_position + 1) // TILE_N, first_tile), last_tile)
        acc, largest, total = _walk(
            acc, largest, total, q, kv_ptr, scales_ptr, pages_ptr, position, begin, end, first_tile, masked_tile,
            score_scale, False, NUM_LAYERS * 2 * PLANE, SCALE_STRIDE, PAGE_TOKENS, HEAD_DIM, BLOCK_D, TILE_N, PLANE,
            VALUE_SCALES, WINDOW, SOFT_CAP, DOT_TYPE,
        )  # fmt: skip
    acc, largest, total = _walk(
        acc, largest, total, q, kv_ptr, scales_ptr, pages_ptr, position, begin, end, masked_tile, last_tile,
        score_scale, True, NUM_LAYERS * 2 * PLANE, SCALE_STRIDE, PAGE_TOKENS, HEAD_DIM, BLOCK_D, TILE_N, PLANE,
        VALUE_SCALES, WINDOW, SOFT_CAP, DOT_TYPE,
    )  # fmt: skip

    if HAS_SINKS and is_only:
        sink = tl.load(sinks_ptr + kv_head * GROUP + pair % GROUP) * 1.4426950408889634
        decline = tl.exp2(largest - tl.maximum(largest, sink))
        total = total * decline + tl.exp2(sink - tl.maximum(largest, sink))
        acc *= decline[:, None]
    # The sum is 0 only for a row without keys in this split. NaN is not equal to 0, so it is kept.
    safe_total = tl.where(total == 0, 1.0, total)
    value = acc / safe_total[:, None]
    if IS_SPLIT:
        line = tl.program_id(0).to(tl.int64) * BLOCK_Q + query if MAX_ROWS == BLOCK_Q else token
        head = line * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + pair % GROUP
        place = (head * num_splits + split) * (HEAD_DIM + PARTIAL_PAD)
        is_partial = is_stored & (is_only == 0)
        tl.store(partial_ptr + place[:, None] + d[None, :], value, mask=is_partial)
        size = largest + tl.log2(safe_total)
        tl.store(partial_ptr + place + HEAD_DIM, size, mask=(query < num_queries) & (is_only == 0))
        is_stored &= is_only
    tl.store(out_ptr + (token * out_stride)[:, None] + column, value, mask=is_stored)
    if IS_SPLIT and is_only == 0:
        # All threads must have stored their part before one of them publishes it. The counter's release and acquire
        # then order these stores before the loads of the program that counts last.
        tl.debug_barrier()
        counter = counters_ptr + tl.program_id(0) * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_used - 1:
            tl.store(counter, 0)
            for first_pair in range(0, num_queries * GROUP, PAIRS):
                _combine(
                    partial_ptr, out_ptr, sinks_ptr, row, num_queries, kv_head, first_pair, num_used, num_splits,
                    out_stride, GROUP, HEAD_DIM, BLOCK_D, BLOCK_Q, MAX_ROWS, PARTIAL_PAD, NUM_KV_HEADS, HAS_SINKS,
                    PAIRS, BLOCK_SPLITS,
                )  # fmt: skip


@triton.jit
def _combine(
    partial_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    row: tl.tensor,
    num_queries: tl.tensor,
    kv_head: tl.tensor,
    first_pair: tl.tensor,
    num_used: tl.tensor,
    num_splits: tl.tensor,
    out_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    PARTIAL_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
) -> None:
    """Combine the partial results of PAIRS of a tile's (query, head) pairs, weighted by their sums of exponentials.

    Reads only the `num_used` splits that had keys, because the others wrote nothing.
    """
    pair = first_pair + tl.arange(0, PAIRS)
    d = tl.arange(0, BLOCK_D)
    query = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    is_pair = query < num_queries
    token = (row + query).to(tl.int64)
    line = tl.program_id(0).to(tl.int64) * BLOCK_Q + query if MAX_ROWS == BLOCK_Q else token
    first_place = (line * (NUM_KV_HEADS * GROUP) + head) * num_splits * (HEAD_DIM + PARTIAL_PAD)
    # A finite number, so that NaN among the sizes does not lead to inf - inf.
    largest = tl.full([PAIRS], -1e30, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    if HAS_SINKS:
        # The sink counts once per head, so `_attend` adds it only if a single split has all keys. Sizes are base-2
        # logarithms, and a sink is an exponent of e.
        largest = tl.load(sinks_ptr + head, mask=is_pair, other=0.0) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([PAIRS, BLOCK_D], tl.float32)
    for first in range(0, num_used, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        is_used = (split < num_used)[:, None] & is_pair[None, :]
        place = partial_ptr + first_place[None, :] + split[:, None] * (HEAD_DIM + PARTIAL_PAD)
        # Other multiprocessors wrote these values, so read them from the L2 cache.
        size = tl.load(place + HEAD_DIM, mask=is_used, other=float("-inf"), cache_modifier=".cg")
        value = tl.load(
            place[:, :, None] + d[None, None, :], mask=is_used[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(size, 0))
        weight = tl.exp2(size - new_largest[None, :])
        decline = tl.exp2(largest - new_largest)
        total = total * decline + tl.sum(weight, 0)
        acc = acc * decline[:, None] + tl.sum(value * weight[:, :, None], 0)
        largest = new_largest
    column = head[:, None] * HEAD_DIM + d[None, :]
    is_stored = is_pair[:, None] & (d < HEAD_DIM)[None, :]
    value = acc / tl.where(is_pair, total, 1.0)[:, None]
    tl.store(out_ptr + (token * out_stride)[:, None] + column, value, mask=is_stored)
