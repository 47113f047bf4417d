"""Pads steps to a few shapes, so that a few graphs serve batches of all sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from loramux.engine.sequences.layer_groups import ALL_GROUPS, LayerGroups
from loramux.kernels.segments import LARGE_SEGMENT_ROWS, SEGMENT_ROWS, max_segments

MAX_GRAPH_TOKENS = 1024
"""Maximum number of rows in a captured step. In larger steps, kernels run longer than the host takes to launch them."""

RANK_BUCKETS = (16, 64, 256)

MAX_SINGLE_ROWS = 4
"""Maximum mean number of rows per adapter for which a decode makes each row a segment of its own. The kernels then need
no tensor cores and run more programs at a time, but read an adapter once per row.
"""

MIN_EXPANDED_FIRST_ROWS = 512
"""Minimum number of rows of a step in which adapters are expanded before the base's product. With fewer rows, the
product of a linear layer mostly waits for its weight, and its output takes little time to read.
"""

_DECODE_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 513, 64))
_MIXED_TOKENS = (16, 32, 64, 128, 256, 512)
_MIXED_SEQUENCES = (8, 32, 128, 512)
_LARGE_STEP = 256


@dataclass(frozen=True, slots=True)
class StepShape:
    """The properties that are fixed when a step is captured.

    `num_tokens` and `num_sequences` include padding. `is_decode` means one row per sequence. `max_rank` is an upper
    bound on the adapters' ranks, or 0 if there are no adapters. Without `has_outer`, no adapter modifies the embedding
    or the head. In each layer, adapters modify only modules in `groups`, which is ALL_GROUPS if there are no adapters.
    Without NORMS, no adapter replaces norms.
    Segments have up to `segment_rows` rows, which is 1 in decodes with few rows per adapter. With `expands_first`, the
    base's product adds to the outputs of adapters, none of which has affines (`StepInputs`).
    """

    num_tokens: int
    num_sequences: int
    is_decode: bool
    max_rank: int
    has_outer: bool = False
    groups: LayerGroups = ALL_GROUPS
    segment_rows: int = SEGMENT_ROWS
    expands_first: bool = False

    @property
    def is_captured(self) -> bool:
        return self.num_tokens <= MAX_GRAPH_TOKENS

    @property
    def num_segments(self) -> int:
        """Upper bound on the number of segments of a batch of this shape, or 0 without adapters."""
        return max_segments(self.num_tokens, self.num_sequences, self.segment_rows) if self.max_rank else 0

    @property
    def with_all_groups(self) -> StepShape:
        """The shape with ALL_GROUPS, which can run any batch of this shape but launches more kernels."""
        return self if ALL_GROUPS in self.groups else replace(self, groups=self.groups | ALL_GROUPS)


def step_shape(
    num_tokens: int,
    num_sequences: int,
    max_q: int,
    max_rank: int,
    has_outer: bool = False,
    groups: LayerGroups = ALL_GROUPS,
    has_single_rows: bool = False,
    has_affines: bool = False,
) -> StepShape:
    """The smallest shape that fits a batch of these sizes.

    With `has_single_rows`, each row of a decode is a segment of its own. With `has_affines`, an adapter may rescale or
    shift the output of a linear layer.
    """
    bucket = rank_bucket(max_rank) if max_rank else 0
    if max_q == 1 and num_sequences <= _DECODE_SIZES[-1]:
        size = _at_least(_DECODE_SIZES, num_sequences)
        return StepShape(size, size, True, bucket, has_outer, groups, 1 if has_single_rows else SEGMENT_ROWS)
    padded_tokens, padded_sequences = _padded(_MIXED_TOKENS, num_tokens), _padded(_MIXED_SEQUENCES, num_sequences)
    return _mixed_shape(padded_tokens, padded_sequences, bucket, has_outer, groups, has_affines)


def rank_bucket(rank: int) -> int:
    """The smallest bucket with room for adapters of a rank, which is at least 1."""
    return _at_least(RANK_BUCKETS, rank)


def _mixed_shape(
    num_tokens: int,
    num_sequences: int,
    max_rank: int,
    has_outer: bool = False,
    groups: LayerGroups = ALL_GROUPS,
    has_affines: bool = False,
) -> StepShape:
    """The shape of a step that is not a decode. Its segments are large if sequences have enough rows to fill half a
    large segment on average.
    """
    is_large = num_tokens >= LARGE_SEGMENT_ROWS // 2 * num_sequences
    segment_rows = LARGE_SEGMENT_ROWS if is_large else SEGMENT_ROWS
    expands_first = max_rank > 0 and num_tokens >= MIN_EXPANDED_FIRST_ROWS and not has_affines
    return StepShape(num_tokens, num_sequences, False, max_rank, has_outer, groups, segment_rows, expands_first)


def reachable_shapes(max_tokens: int, max_sequences: int) -> Iterator[StepShape]:
    """All shapes within these limits that have their own kernels, except those with `has_outer`, largest first.

    Shapes with fewer groups are left out, because they launch a subset of the kernels of the shape with all groups.
    """
    ranks = (0, *RANK_BUCKETS)
    mixed_tokens = [*(size for size in _MIXED_TOKENS if size < max_tokens), _padded(_MIXED_TOKENS, max_tokens)]
    mixed_sequences = [size for size in _MIXED_SEQUENCES if size < max_sequences]
    mixed_sequences.append(_padded(_MIXED_SEQUENCES, max_sequences))
    most = _at_least(_DECODE_SIZES, min(max_sequences, _DECODE_SIZES[-1]))
    for rank in reversed(ranks):
        for num_tokens in reversed(mixed_tokens):
            for num_sequences in reversed(mixed_sequences):
                shape = _mixed_shape(num_tokens, num_sequences, rank)
                yield shape
                if shape.expands_first:
                    yield replace(shape, expands_first=False)
        for size in reversed(_DECODE_SIZES):
            if size > most:
                continue
            if rank:
                yield StepShape(size, size, True, rank, segment_rows=1)
            if not rank or size > MAX_SINGLE_ROWS:
                yield StepShape(size, size, True, rank)


def _at_least(sizes: tuple[int, ...], number: int) -> int:
    return sizes[bisect_left(sizes, number)]


def _padded(sizes: tuple[int, ...], number: int) -> int:
    if number <= sizes[-1]:
        return _at_least(sizes, number)
    return -(-number // _LARGE_STEP) * _LARGE_STEP
