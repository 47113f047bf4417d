"""LoRA over paged adapters in plain PyTorch: shrink, gather and expand, and the replacement of trained rows."""

from __future__ import annotations

import torch

from loramux.kernels.layout import AFFINE, A, B, LinearShape, part_layout
from loramux.kernels.reference.trained_rows import trained_rows
from loramux.kernels.tables import LoraCall, PoolViews, Segments


class ReferenceLora:
    """The specification of `LoraKernels` over one page pool.

    `T` is the number of rows (tokens) in the batch, and `E` is the number of adapter elements of a page in one layer.
    """

    segment_rows = 1 << 30

    def __init__(self, pool: PoolViews) -> None:
        self._pool, self._adapters = pool, pool.of_adapters

    def adapter_matrix(self, call: LoraCall, slot: int, i: int, part: int, expert: int = 0) -> torch.Tensor:
        """Read A `[rank, in_features]`, B transposed `[rank, out_features]` or affine `[2, out_features]`, in float32.

        Element `e` of the stream is `pool[page_table[slot, e // E], layer, e % E]`; row `r` starts at `off[slot, layer,
        module, part] + r * padded_len`. Elements in uint8 are FP8 codes (float8_e4m3fn). An embedding's A is returned
        as stored, `[in_features, rank]`.
        """
        layer, group, tables = call.layer, call.group, call.tables
        page_elements = self._adapters.geometry.adapter_elements
        module = group.modules[i] + expert * group.expert_stride
        rank = int(tables.rank[slot, layer, module])
        offset = int(tables.off[slot, layer, module, part])
        shape = LinearShape("", group.in_features, group.out_features[i], group.is_embedding)
        rows = part_layout(shape, part, rank, page_elements)
        row_start = offset + torch.arange(rows.num_rows) * rows.row.padded_len
        element = row_start[:, None] + torch.arange(rows.row.row_len)  # [num_rows, row_len]
        page = tables.page_table[slot].long()[element // page_elements]
        elements = self._adapters.adapter[page, layer, element % page_elements]
        if elements.dtype is torch.uint8:
            elements = elements.view(torch.float8_e4m3fn)
        return elements.float()

    def lora_planes(self, call: LoraCall, num_tokens: int) -> torch.Tensor:
        """float32 `[num_tokens, len(group.modules), segments.max_rank]`, uninitialised."""
        return torch.empty(num_tokens, len(call.group.modules), call.segments.max_rank)

    def lora_shrink(self, x: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
        """`planes[t, i, :rank] = x[t] @ A[slot, modules[i]]ᵀ` for each row `t` of each segment.

        `x` float32 `[T, in_features]`; `planes` float32 `[T, len(group.modules), max_rank]`. Rows without an adapter
        and entries from `rank` on are left unchanged. For a group of experts, `t` is a pair, `planes` has a row for
        each pair, and `x` may have a row for each token instead.
        """
        pairs_per_row = planes.shape[0] // max(1, x.shape[0])
        for rows, slot, expert in _slots_of(call.segments):
            for i in range(len(call.group.modules)):
                a = self.adapter_matrix(call, slot, i, A, expert)  # [rank, in_features]
                planes[rows, i, : a.shape[0]] = x[rows // pairs_per_row] @ a.T

    def lora_expand(self, planes: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t, columns of i] += scale * planes[t, i, :rank] @ B[slot, modules[i]]ᵀ` for each row of each segment.

        If the adapter has affines, each sum `y` then becomes `y + gain * y + shift`.

        `y` float32 `[T, group.total_out]`. Rows without an adapter and columns of a module whose rank is 0 keep
        their exact bits.
        """
        group = call.group
        for rows, slot, expert in _slots_of(call.segments):
            for i, first_module in enumerate(group.modules):
                module = first_module + expert * group.expert_stride
                begin, width = group.out_offsets[i], group.out_features[i]
                b = self.adapter_matrix(call, slot, i, B, expert)  # [rank, out_features]
                if b.shape[0]:
                    scale = float(call.tables.scale[slot, call.layer, module])
                    total = y[rows, begin : begin + width] + scale * (planes[rows, i, : b.shape[0]] @ b)
                    if call.tables.off[slot, call.layer, module, AFFINE] >= 0:
                        gain, shift = self.adapter_matrix(call, slot, i, AFFINE, expert)
                        total += gain * total + shift
                    y[rows, begin : begin + width] = total

    def lora_add(self, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t, columns of i] += scale * (x[t] @ A[slot, modules[i]]ᵀ) @ B[slot, modules[i]]ᵀ`: shrink, then expand."""
        planes = self.lora_planes(call, y.shape[0])
        self.lora_shrink(x, call, planes)
        self.lora_expand(planes, call, y)

    def lora_delta(self, x: torch.Tensor, call: LoraCall, slots: torch.Tensor, y: torch.Tensor) -> None:
        """`y = 0`, then `lora_add`. `slots` repeats which rows no segment lists, for devices that write them alone."""
        y.zero_()
        self.lora_add(x, call, y)

    def lora_affine(self, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t] = y[t] + gain * y[t] + shift` for each row `t` of each segment whose adapter has an affine.

        `y` float32 `[T, group.total_out]`; the group has one module. All other rows keep their exact bits.
        """
        (module,) = call.group.modules
        for rows, slot, _ in _slots_of(call.segments):
            if call.tables.off[slot, call.layer, module, AFFINE] >= 0:
                gain, shift = self.adapter_matrix(call, slot, 0, AFFINE)
                y[rows] += gain * y[rows] + shift

    def lora_gather(self, tokens: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
        """`planes[t, 0, :rank] = A[slot, modules[0]][:, tokens[t]]` for each row `t` of each segment.

        `tokens` int32 `[T]` in `[0, in_features)`; the group is one embedding. The other arguments are as for
        `lora_shrink`.
        """
        for rows, slot, _ in _slots_of(call.segments):
            a = self.adapter_matrix(call, slot, 0, A)  # [in_features, rank]
            planes[rows, 0, : a.shape[1]] = a[tokens[rows].long()]

    def replace_rows(self, tokens: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t] = row of tokens[t]` for each row `t` of each segment whose adapter replaces the token's row.

        `tokens` int32 `[T]`; `y` `[T, hidden_size]` in the dtype of `pool.adapter`; the group is one embedding, and
        the tables are `AdapterTables.trained_rows`. All other rows keep their exact bits.
        """
        for rows, slot, _ in _slots_of(call.segments):
            ids, values = trained_rows(self._adapters, call, slot)
            listed, row = (tokens[rows][:, None] == ids).nonzero(as_tuple=True)
            y[rows[listed]] = values[row]

    def replace_columns(self, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t, id] = x[t] · row of id` for each row `t` of each segment and each id whose row the adapter replaces.

        `x` `[T, hidden_size]`; `y` `[T, num_columns]`, a column for each id; the group is the head, and the tables are
        `AdapterTables.trained_rows`. All other elements keep their exact bits.
        """
        for rows, slot, _ in _slots_of(call.segments):
            ids, values = trained_rows(self._adapters, call, slot)
            y[rows[:, None], ids] = (x[rows].float() @ values.float().T).to(y.dtype)


def _slots_of(segments: Segments) -> list[tuple[torch.Tensor, int, int]]:
    """The rows (int64), the slot and the expert of each segment that is not padding."""
    starts = segments.starts.tolist()
    experts = [0] * segments.num_segments if segments.experts is None else segments.experts.tolist()
    return [
        (segments.rows[starts[i] : starts[i + 1]].long(), slot, experts[i])
        for i, slot in enumerate(segments.slots.tolist())
        if slot >= 0
    ]
