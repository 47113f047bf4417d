"""Every kernel in plain PyTorch: the specification, and the oracle of the tests."""

from __future__ import annotations

import torch
from torch.nn import functional

from loramux.kernels.layout import A, B, LinearShape, part_layout
from loramux.kernels.tables import AdapterTables, AttentionBatch, AttentionSpec, ModuleGroup, PoolViews, Segments


class ReferenceKernels:
    """The kernels over one page pool, written for reading.

    `T` is the number of rows (tokens) of the batch, `E` the adapter elements of a page in one layer.
    """

    segment_rows = 1 << 30

    def __init__(self, pool: PoolViews) -> None:
        self._pool = pool

    @property
    def outer(self) -> ReferenceKernels:
        return ReferenceKernels(self._pool.flat)

    def adapter_matrix(
        self, tables: AdapterTables, slot: int, layer: int, group: ModuleGroup, i: int, half: int
    ) -> torch.Tensor:
        """Read A `[rank, in_features]` or B transposed `[rank, out_features]` out of the pages, as float32.

        Element `e` of the stream is `pool[page_table[slot, e // E], layer, e % E]`; row `r` starts at
        `off[slot, layer, module, half] + r * padded_len`. An embedding's A is read as it is stored,
        `[in_features, rank]`.
        """
        page_elements = self._pool.geometry.adapter_elements
        module = group.modules[i]
        rank = int(tables.rank[slot, layer, module])
        offset = int(tables.off[slot, layer, module, half])
        shape = LinearShape("", group.in_features, group.out_features[i], group.is_embedding)
        part = part_layout(shape, half, rank, page_elements)
        row_start = offset + torch.arange(part.num_rows) * part.row.padded_len
        element = row_start[:, None] + torch.arange(part.row.row_len)  # [num_rows, row_len]
        page = tables.page_table[slot].long()[element // page_elements]
        return self._pool.adapter[page, layer, element % page_elements].float()

    def lora_planes(self, group: ModuleGroup, num_tokens: int, segments: Segments) -> torch.Tensor:
        """float32 `[num_tokens, len(group.modules), segments.max_rank]`; its content means nothing."""
        return torch.empty(num_tokens, len(group.modules), segments.max_rank)

    def lora_shrink(
        self,
        x: torch.Tensor,
        layer: int,
        group: ModuleGroup,
        tables: AdapterTables,
        segments: Segments,
        planes: torch.Tensor,
    ) -> None:
        """`planes[t, i, :rank] = x[t] @ A[slot, modules[i]]ᵀ` for each row `t` of each segment.

        `x` float32 `[T, in_features]`; `planes` float32 `[T, len(group.modules), max_rank]`. Rows without an adapter
        and entries from `rank` on are left as they are.
        """
        for rows, slot in _slots_of(segments):
            for i in range(len(group.modules)):
                a = self.adapter_matrix(tables, slot, layer, group, i, A)  # [rank, in_features]
                planes[rows, i, : a.shape[0]] = x[rows] @ a.T

    def lora_expand(
        self,
        planes: torch.Tensor,
        layer: int,
        group: ModuleGroup,
        tables: AdapterTables,
        segments: Segments,
        y: torch.Tensor,
    ) -> None:
        """`y[t, columns of i] += scale * planes[t, i, :rank] @ B[slot, modules[i]]ᵀ` for each row of each segment.

        `y` float32 `[T, group.total_out]`. Rows without an adapter are left bit for bit as they are, and so are the
        columns of a module whose rank is 0.
        """
        for rows, slot in _slots_of(segments):
            for i, module in enumerate(group.modules):
                begin, width = group.out_offsets[i], group.out_features[i]
                b = self.adapter_matrix(tables, slot, layer, group, i, B)  # [rank, out_features]
                if b.shape[0]:
                    scale = float(tables.scale[slot, layer, module])
                    y[rows, begin : begin + width] += scale * (planes[rows, i, : b.shape[0]] @ b)

    def lora_add(
        self,
        x: torch.Tensor,
        layer: int,
        group: ModuleGroup,
        tables: AdapterTables,
        segments: Segments,
        y: torch.Tensor,
    ) -> None:
        """`y[t, columns of i] += scale * (x[t] @ A[slot, modules[i]]ᵀ) @ B[slot, modules[i]]ᵀ`: shrink, then expand."""
        planes = self.lora_planes(group, x.shape[0], segments)
        self.lora_shrink(x, layer, group, tables, segments, planes)
        self.lora_expand(planes, layer, group, tables, segments, y)

    def lora_gather(
        self,
        tokens: torch.Tensor,
        layer: int,
        group: ModuleGroup,
        tables: AdapterTables,
        segments: Segments,
        planes: torch.Tensor,
    ) -> None:
        """`planes[t, 0, :rank] = A[slot, modules[0]][:, tokens[t]]` for each row `t` of each segment.

        `tokens` int32 `[T]` in `[0, in_features)`; the group is one embedding. Otherwise as `lora_shrink`.
        """
        for rows, slot in _slots_of(segments):
            a = self.adapter_matrix(tables, slot, layer, group, 0, A)  # [in_features, rank]
            planes[rows, 0, : a.shape[1]] = a[tokens[rows].long()]

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, layer: int, batch: AttentionBatch) -> None:
        """Store K and V of row `t` at `batch.kv_slots[t]`, rounded to the pool's dtype (to nearest, ties to even).

        `k` and `v` float32 `[T, num_kv_heads, head_dim]`. A row with a negative slot is not stored.
        """
        page_tokens = self._pool.geometry.page_tokens
        keys, values = self._kv_pages(layer)
        is_stored = batch.kv_slots >= 0
        kv_slots = batch.kv_slots[is_stored]
        page, place = kv_slots // page_tokens, kv_slots % page_tokens
        keys[page, :, :, place] = k[is_stored].to(keys.dtype)
        values[page, :, place, :] = v[is_stored].to(values.dtype)

    def paged_attention(
        self, q: torch.Tensor, layer: int, batch: AttentionBatch, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        """`out[t] = softmax(soft_cap(q[t] kᵀ * scale) + mask) v` over the context of row `t`'s sequence.

        `q` and `out` float32 `[T, num_heads, head_dim]`; head `h` reads KV head `h // (num_heads // num_kv_heads)`.
        The query at position `p` sees keys `[0, p]`, with a window `[max(0, p - sliding_window + 1), p]`.
        A sequence without query rows is passed over, whatever else is said of it, and so are rows of no sequence.
        `soft_cap(s) = cap * tanh(s / cap)`. Pool elements outside the contexts are never used, not even times zero.
        """
        keys, values = self._kv_pages(layer)
        for i, length in enumerate(batch.seq_lens.tolist()):
            begin, end = int(batch.cu_q[i]), int(batch.cu_q[i + 1])
            if begin == end:
                continue
            first_page = int(batch.page_starts[i])
            num_pages = -(-length // self._pool.geometry.page_tokens)
            pages = batch.pages[first_page : first_page + num_pages].long()
            k = keys[pages].permute(1, 0, 3, 2).flatten(1, 2)[:, :length].float()  # [num_kv_heads, length, head_dim]
            v = values[pages].permute(1, 0, 2, 3).flatten(1, 2)[:, :length].float()
            group_size = spec.num_heads // spec.num_kv_heads
            scores = torch.einsum("thd,hsd->hts", q[begin:end], k.repeat_interleave(group_size, 0)) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            position = torch.arange(length - (end - begin), length)[:, None]
            is_hidden = torch.arange(length) > position
            if spec.sliding_window is not None:
                is_hidden |= torch.arange(length) <= position - spec.sliding_window
            weights = torch.softmax(scores.masked_fill(is_hidden, -torch.inf), -1)
            out[begin:end] = torch.einsum("hts,hsd->thd", weights, v.repeat_interleave(group_size, 0))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last axis; `x` float32 `[..., n]`, `weight` float32 `[n]`."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`residual += x` in place, then `rms_norm` of that sum; `x` and `residual` float32 `[T, n]`."""
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotary(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate `(a, b)`, the halves of the first `2 * n` elements of each head, to `(a cos - b sin, b cos + a sin)`.

        `q` float32 `[T, num_heads, head_dim]` and `k` float32 `[T, num_kv_heads, head_dim]` are changed in place;
        `cos` and `sin` float32 `[T, n]`, `2 * n <= head_dim`.
        """
        n = cos.shape[1]
        for heads in (q, k):
            a, b = heads[..., :n].clone(), heads[..., n : 2 * n].clone()
            heads[..., :n] = a * cos[:, None] - b * sin[:, None]
            heads[..., n : 2 * n] = b * cos[:, None] + a * sin[:, None]

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
    ) -> None:
        """`rotary`, then `kv_write`: a device may do both at once."""
        self.rotary(q, k, cos, sin)
        self.kv_write(k, v, layer, batch)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gate * sigmoid(gate) * up` `[T, n]` of float32 `gate_up` `[T, 2 * n]`: gate, then up."""
        gate, up = gate_up.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gelu(gate) * up` `[T, n]` of float32 `gate_up` `[T, 2 * n]`: gate, then up; gelu in its tanh form."""
        gate, up = gate_up.chunk(2, -1)
        return functional.gelu(gate, approximate="tanh") * up

    def _kv_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K as `[P, num_kv_heads, head_dim, page_tokens]` and V as `[P, num_kv_heads, page_tokens, head_dim]`."""
        geometry = self._pool.geometry
        half = geometry.kv_elements // 2
        pages = self._pool.kv[:, layer]
        return (
            pages[:, :half].unflatten(1, (geometry.num_kv_heads, geometry.head_dim, geometry.page_tokens)),
            pages[:, half:].unflatten(1, (geometry.num_kv_heads, geometry.page_tokens, geometry.head_dim)),
        )


def _slots_of(segments: Segments) -> list[tuple[torch.Tensor, int]]:
    """The token rows (int64) and the slot of each segment that is not padding."""
    starts = segments.starts.tolist()
    return [
        (segments.rows[starts[i] : starts[i + 1]].long(), slot)
        for i, slot in enumerate(segments.slots.tolist())
        if slot >= 0
    ]
