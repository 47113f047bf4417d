"""The tables and metadata that kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loramux.kernels.layout import MAX_RANK, PageGeometry


@dataclass(frozen=True, slots=True, eq=False)
class PoolViews:
    """The page pool `uint8[P, L, page_bytes]` and its two typed views.

    `kv` is `kv_dtype[P, L, page_bytes / itemsize]`. If groups of layers have separate pages for K and V, it is
    `kv_dtype[P * L, 1, page_bytes / itemsize]`. A page of K and V is then a range of the pool's `P * L` layers,
    identified by the index of its first layer, and the layers of a group are numbered from 0. If a group's K and V are
    smaller than the geometry's, `kv_of` divides each layer of the pool into several layers of the group's size, and
    indices count these smaller layers. On a CPU, the first half of a page's elements in a layer is K
    `[num_kv_heads, head_dim, 16]`, and the second half is V `[num_kv_heads, 16, head_dim]`. On a GPU, K has the same
    layout as V. `adapter` is `adapter_dtype[P, L, E]`.

    If `kv` is int8, an element of K or V is a code times the scale of its token and head. `kv_scales` is bfloat16, with
    as many pages and layers as `kv`. In each layer, it begins with the scales of K `[num_kv_heads, 16]`, followed by
    those of V `[num_kv_heads, 16]`. The scales are not in the pages, because rows of adapters are read in chunks that
    divide `E`, which would no longer be a multiple of a large power of two.

    If the adapters of these layers are in the pages of another pool, `adapter_views` is that pool.
    """

    raw: torch.Tensor
    kv: torch.Tensor
    adapter: torch.Tensor
    geometry: PageGeometry
    kv_scales: torch.Tensor | None = None
    adapter_views: PoolViews | None = None

    @property
    def of_adapters(self) -> PoolViews:
        """The pool whose pages contain the adapters."""
        return self if self.adapter_views is None else self.adapter_views

    def kv_of(self, num_kv_heads: int, head_dim: int) -> torch.Tensor:
        """`kv` for layers with these KV heads, whose K and V may be smaller than the geometry's."""
        num_elements = 2 * self.geometry.page_tokens * num_kv_heads * head_dim
        return self.kv if self.kv.shape[2] == num_elements else self.kv.view(-1, 1, num_elements)

    def scales_of(self, num_kv_heads: int, head_dim: int) -> torch.Tensor | None:
        """`kv_scales` with as many pages and layers as `kv_of`, or None if `kv` is not int8."""
        if self.kv_scales is None:
            return None
        num_scales = self.kv_of(num_kv_heads, head_dim).shape[2] // self.geometry.elements_per_scale
        return self.kv_scales if self.kv_scales.shape[2] == num_scales else self.kv_scales.view(-1, 1, num_scales)

    @property
    def state(self) -> torch.Tensor:
        """The pool as float32 `[P, total_page_bytes / 4]`, for the states of sequences."""
        return self.raw.view(self.raw.shape[0], -1).view(torch.float32)

    @property
    def flat(self) -> PoolViews:
        """The pool's pages viewed as one layer each, `[P, 1, L * E]`, for the outer modules' stream."""
        raw, kv, adapter = (view.view(view.shape[0], 1, -1) for view in (self.raw, self.kv, self.adapter))
        return PoolViews(raw=raw, kv=kv, adapter=adapter, geometry=self.geometry.flat)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTables:
    """Location of each resident adapter, by slot; written only between steps.

    `page_table` is int32 `[num_slots, max_pages]`, `off` is int32 `[num_slots, L, M, 3]` in elements, `rank` is int32
    `[num_slots, L, M]`, and `scale` is float32 `[num_slots, L, M]`.

    `outer` contains the tables of the modules outside the layers, with L = 1, offsets in elements of whole pages, and
    the same `page_table`. `trained_rows` contains the tables of the rows that adapters replace in those modules, with
    L = 1: `rank` is the number of rows, `off[..., 0]` is their offset in elements of whole pages, and `off[..., 1]` is
    the offset of their ids in units of four bytes. `scale` is unused. It is None if no adapter has such rows. `drafter`
    contains the tables of the modules of the base's own head for drafts, with L = 1 and offsets in elements of whole
    pages. It is None if the base has no such head. These three tables have no such tables of their own.
    """

    page_table: torch.Tensor
    off: torch.Tensor
    rank: torch.Tensor
    scale: torch.Tensor
    outer: AdapterTables | None = None
    trained_rows: AdapterTables | None = None
    drafter: AdapterTables | None = None


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules that share one input and therefore one shrink and one expand: q/k/v, o, gate/up, down.

    `modules` are indices into the tables' axis M. Module `i` writes columns `[out_offsets[i], out_offsets[i] +
    out_features[i])` of the group's output. An embedding forms its own group: its input is one of `in_features` tokens,
    and its shrink is `lora_gather`.

    In a group of experts, `modules` are the modules of expert 0. The indices of expert `e`'s modules are higher by
    `e * expert_stride`. Modules of the group may write the same columns, but no adapter has two such modules of one
    expert.
    """

    modules: tuple[int, ...]
    in_features: int
    out_features: tuple[int, ...]
    out_offsets: tuple[int, ...]
    is_embedding: bool = False
    expert_stride: int = 0

    @property
    def total_out(self) -> int:
        return max(offset + width for offset, width in zip(self.out_offsets, self.out_features, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Rows of a batch that use an adapter, grouped by slot. Rows without an adapter are not listed.

    `rows` int32 `[num_lora_rows]` are token rows, `starts` int32 `[num_segments + 1]` are indices into `rows`, and
    `slots` int32 `[num_segments]` are adapter slots. Segment `i` is `rows[starts[i]:starts[i + 1]]` and uses adapter
    slot `slots[i]`. No listed adapter has a rank above `max_rank`, so planes do not have to be wider. `max_rows` bounds
    the rows of a segment and determines the tile size on a GPU.

    For a group of experts, `rows` are pairs of a `Routing`, and segment `i` uses the modules of expert `experts[i]`,
    int32 `[num_segments]`. For all other groups, `experts` is None.

    `adapters` int32 lists each slot of `slots` once, in any order, followed by -1. It may be None if no linear layer is
    multiplied together with its adapters (`Kernels.lora_linear`).

    A captured graph has a fixed number of segments, so slot -1 marks a padding segment on a GPU.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    max_rank: int = MAX_RANK
    max_rows: int = 16
    experts: torch.Tensor | None = None
    adapters: torch.Tensor | None = None

    @property
    def num_segments(self) -> int:
        return int(self.slots.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class LoraCall:
    """One LoRA call: applies `group` in `layer` to each segment, using the adapters' entries in `tables`.

    For modules outside the layers, `layer` is 0 and `tables` is `AdapterTables.outer`. For a group of experts, the
    output has a row for each pair of a `Routing`, and the input has a row for each pair or for each token.
    """

    layer: int
    group: ModuleGroup
    tables: AdapterTables
    segments: Segments


@dataclass(frozen=True, slots=True, eq=False)
class ContiguousKeys:
    """Where the K and V of a step's prefills are in contiguous rows, for attention kernels that cannot read pages.

    A prefill is a sequence with at least two query rows. Query rows are divided into the ranges `[cu_q[i], cu_q[i +
    1])`, and the rows of K and V into the ranges `[cu_k[i], cu_k[i + 1])`. Range `2 * j + 1` is the `j`-th prefill: its
    rows are the last positions of its context, which is its range of K and V. The ranges between them contain all other
    query rows, whose results are overwritten, and rows of K and V that belong to no context.

    Without `pages`, no prefill has a prefix. `cu_k` is then `cu_q`: K and V of query row `t` are in row `t`, as
    `Kernels.rotate_and_store` leaves them. With `pages`, int32 `[num_listed]`, page `pages[i]` contains rows
    `[page_tokens * i, page_tokens * (i + 1))` of K and V.

    `cu_q` and `cu_k` are int32 `[2 * num_prefills + 2]`. `max_q` and `max_k` bound the query rows and the context of a
    prefill. `num_rows` is the number of query rows of all sequences. `rows_per_key` is the mean number of query rows of
    the prefill that a row of K belongs to. `has_decodes` is true if a sequence has a single query row.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    pages: torch.Tensor | None
    max_q: int
    max_k: int
    num_rows: int
    rows_per_key: float
    has_decodes: bool


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """The sequences of a step: their query rows, context lengths and pages.

    The query rows `[cu_q[i], cu_q[i + 1])` of sequence `i` are the last positions of its context `[0, seq_lens[i])`.
    Position `p` of the context is in page `pages[page_starts[i] + p // page_tokens]`. The pages of all sequences form
    one ragged list, so copying a step's metadata stays cheap even if one context is very long. Layers with a window
    need no pages before the first key that a row sees. If these pages are not listed, `page_starts[i]` may be negative.

    `cu_q` is int32 `[num_sequences + 1]`, `seq_lens` and `page_starts` are int32 `[num_sequences]`, and `pages` is
    int32 `[num_listed]`. `kv_slots`, int64 `[num_tokens]`, contains `page * page_tokens + position % page_tokens` for
    each row. `max_q` bounds the query rows of any sequence and is known on the host; 1 guarantees pure decode.

    A captured graph has fixed numbers of sequences and rows. On a GPU, a padding sequence has no query rows. A padding
    row belongs to no sequence and has a negative entry in `kv_slots`.

    `contiguous` is known only in steps that are not captured, and None in all others.
    """

    cu_q: torch.Tensor
    seq_lens: torch.Tensor
    pages: torch.Tensor
    page_starts: torch.Tensor
    kv_slots: torch.Tensor
    max_q: int
    contiguous: ContiguousKeys | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer: `softmax(soft_cap(q kᵀ * scale) + causal or windowed mask) v`.

    `sliding_window` is the number of keys visible to a query, including its own; None means the whole context.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
