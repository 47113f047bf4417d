"""The launches of attention on a GPU, chosen by shapes alone, and the limits of its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import AttentionSpec

PAGE_TOKENS = 16
MAX_HEAD_DIM = 512
MAX_SPLITS = 64
MAX_GROUP = 128
NO_LIMIT = 1 << 30
SMALL_STEP = 512
"""Steps of up to this many rows use at least four splits for prefill, whose tiles alone would not fill the device."""
FULL_DEVICE = 3
"""Number of decode programs per multiprocessor beyond which more programs bring no speed-up (measured on an H100)."""
LONG_CONTEXT = 2048
"""If the batch fills the device, contexts of up to this many keys are not split."""
PARTIAL_PAD = 4
"""Floats after the `head_dim` values of a partial row: its base-2 logsumexp, and padding to align rows to 16 bytes."""


def check_attention(spec: AttentionSpec, geometry: PageGeometry) -> None:
    """Raise ValueError, naming the limit, if the kernels do not support this attention."""
    if geometry.page_tokens != PAGE_TOKENS:
        raise ValueError(f"pages hold {geometry.page_tokens} tokens; attention supports pages of {PAGE_TOKENS}")
    if spec.head_dim % 8 or not 8 <= spec.head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {spec.head_dim}; attention supports multiples of 8 from 8 to {MAX_HEAD_DIM}")
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly")
    if spec.num_heads > MAX_GROUP * spec.num_kv_heads:
        raise ValueError(
            f"{spec.num_heads} query heads share {spec.num_kv_heads} KV heads; at most {MAX_GROUP} can share one"
        )
    if geometry.num_kv_heads * geometry.head_dim % (spec.num_kv_heads * spec.head_dim):
        raise ValueError("num_kv_heads * head_dim of the attention does not divide the pages' num_kv_heads * head_dim")
    if spec.sliding_window is not None and spec.sliding_window < 1:
        raise ValueError(f"sliding_window is {spec.sliding_window}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Tiling:
    """One launch over the sequences with `[min_rows, max_rows]` query rows.

    A program processes `block_m` (query, head) pairs, in tiles of `tile_n` keys. `num_splits` programs share a context.
    Each share has at least `min_tiles` tiles, except possibly the last, so some programs have no work if the context is
    short.
    """

    min_rows: int
    max_rows: int
    block_m: int
    tile_n: int
    num_splits: int
    num_warps: int
    num_stages: int
    min_tiles: int = 1

    def block_q(self, group_size: int) -> int:
        """Number of query rows per program. Their pairs are packed as `query * group_size + head`."""
        return min(self.block_m // group_size, self.max_rows)

    def num_tiles(self, num_tokens: int, num_sequences: int, group_size: int) -> int:
        """Upper bound on the number of programs per KV head and split, for any sequence lengths."""
        block_q = self.block_q(group_size)
        return num_sequences if block_q == self.max_rows else num_tokens // block_q + num_sequences

    def num_partial_rows(self, num_tokens: int, num_sequences: int) -> int:
        """Number of query rows in a workspace. Each short sequence gets room for `max_rows` rows."""
        return num_tokens if self.max_rows == NO_LIMIT else num_sequences * self.max_rows


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All launch parameters that are fixed in a captured graph. They depend only on shapes.

    `short` handles sequences with only a few query rows (decode), and `long` handles all other sequences (prefill). If
    a launch is None, it is skipped, and no batch that uses the plan may have a sequence that needs it.
    """

    short: Tiling | None
    long: Tiling | None

    def workspace_elements(self, num_tokens: int, num_sequences: int, spec: AttentionSpec) -> int:
        """float32 elements that `paged_attention` needs for partial results. Layers may share the workspace."""
        return max(
            tiling.num_partial_rows(num_tokens, num_sequences)
            * spec.num_heads
            * tiling.num_splits
            * (spec.head_dim + PARTIAL_PAD)
            if tiling is not None and tiling.num_splits > 1
            else 0
            for tiling in (self.short, self.long)
        )

    def num_counters(self, num_tokens: int, num_sequences: int, spec: AttentionSpec) -> int:
        """Number of counters that `paged_attention` needs. Layers may share the counters."""
        group_size = spec.num_heads // spec.num_kv_heads
        return max(
            tiling.num_tiles(num_tokens, num_sequences, group_size) * spec.num_kv_heads
            if tiling is not None and tiling.num_splits > 1
            else 0
            for tiling in (self.short, self.long)
        )


def attention_plan(
    num_tokens: int,
    num_sequences: int,
    spec: AttentionSpec,
    itemsize: int,
    *,
    short_rows: int = 1,
    all_short: bool = False,
    num_processors: int = 132,
    has_codes: bool = False,
) -> AttentionPlan:
    """Choose the launches for batches of `num_tokens` rows and `num_sequences` sequences, both including padding.

    Sequences with up to `short_rows` query rows are short. `all_short` guarantees that all sequences are short.
    `itemsize` is q's element size in bytes, and `num_processors` is the device's number of multiprocessors. With
    `has_codes`, K and V are int8 codes.
    """
    group_size = spec.num_heads // spec.num_kv_heads
    block_d = max(16, triton.next_power_of_2(spec.head_dim))
    # Tiles of K and V are at most 16 KiB, so that several programs fit on a multiprocessor. float32 is multiplied
    # exactly, without tensor cores. Its tiles are at most 8 KiB, to avoid register spills, except that every tile has
    # at least 16 keys.
    is_exact = itemsize == 4
    tile_n = min(64, max(16, (8192 if is_exact else 16384) // (block_d * itemsize)))

    # Use at least four splits even for large batches, so that one long context does not delay the whole step. Batches
    # that fill the device without splits do not split short contexts.
    short_programs = max(1, num_sequences) * spec.num_kv_heads
    fills_device = short_programs >= FULL_DEVICE * num_processors
    short = Tiling(
        min_rows=1,
        max_rows=short_rows,
        block_m=max(16, triton.next_power_of_2(group_size * short_rows)),
        tile_n=tile_n,
        num_splits=min(MAX_SPLITS, max(4, triton.next_power_of_2(triton.cdiv(4 * num_processors, short_programs)))),
        num_warps=4,
        num_stages=3 if block_d <= 256 else 2,
        min_tiles=max(1, LONG_CONTEXT // tile_n) if fills_device else 1,
    )
    if all_short:
        return AttentionPlan(short, None)

    block_m = 128
    if is_exact or block_d > 256:
        # In float32, 32 queries of 512 elements would need more shared memory than GPUs of capability 8.6 have.
        block_m = 16 if is_exact and block_d > 256 else 32
    elif block_d > 128 or num_tokens * group_size <= 512:
        block_m = 64
    if has_codes:
        # Converted codes take registers. Without tensor cores that read B from shared memory, larger tiles would spill.
        block_m, tile_n = min(block_m, 64), max(16, tile_n // 2)
    block_m = max(block_m, triton.next_power_of_2(group_size))
    # Use at least four splits in small steps, so that a few rows after a long prefix do not delay many decodes.
    fewest_splits = 4 if num_tokens <= SMALL_STEP else 1
    long_programs = max(1, num_tokens * group_size // block_m) * spec.num_kv_heads
    long = Tiling(
        min_rows=short_rows + 1,
        max_rows=NO_LIMIT,
        block_m=block_m,
        tile_n=tile_n,
        num_splits=min(16, triton.next_power_of_2(max(fewest_splits, num_processors // long_programs))),
        num_warps=8 if block_m * block_d >= 128 * 128 else 4,
        # Large tiles are faster with fewer stages (measured on an H100).
        num_stages=3 if block_d <= 128 and block_m < 128 else 2,
    )
    return AttentionPlan(short, long)
