"""Methods of applying a batch's adapters without a peer's code: loramux's kernels, and gather + bmm in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.adapters import SCALE, LoraBatch, ResidentAdapters
from loramux.kernels.gpu.lora.expand import lora_expand
from loramux.kernels.gpu.lora.shrink import lora_shrink, num_splits
from loramux.kernels.layout import A, B
from loramux.kernels.tables import LoraCall, ModuleGroup

LayerLaunch = Callable[[int, list[torch.Tensor]], None]
"""Adds one layer's adapter output to each group's output, in place."""

MakeLaunch = Callable[[ResidentAdapters, LoraBatch, int], LayerLaunch]
"""Lays out dense copies of the adapters for some layers, which the other layers reuse, and returns the launch."""

STORED_BYTES = 1 << 30
"""Approximate limit for dense copies, in bytes: many times the size of L2. A step cycles through the stored layers."""


def power_of_two_above(number: int) -> int:
    return 1 << (number - 1).bit_length()


class OwnPlanes:
    """The buffers (planes) through which shrink passes its sums to expand. Each group has one set, shared by all
    layers.
    """

    def __init__(self, adapters: ResidentAdapters, batch: LoraBatch) -> None:
        case, E = batch.case, adapters.pool.geometry.adapter_elements
        max_rank = power_of_two_above(batch.segments.max_rank)
        self.by_group = [
            torch.full(
                (num_splits(group, E, case.num_rows, batch.segments.num_segments), case.num_rows, len(group.modules),
                 max_rank),
                torch.nan, device=batch.xs[0].device,
            )
            for group in batch.model.groups
        ]  # fmt: skip

    def traffic_bytes(self, batch: LoraBatch) -> int:
        """Bytes of planes that shrink writes and expand reads in a step. Most of them stay in L2."""
        splits = sum(planes.shape[0] * planes.shape[2] for planes in self.by_group)
        return 2 * 4 * splits * batch.case.rows_each * sum(batch.case.ranks) * batch.model.num_layers


def loramux_way(adapters: ResidentAdapters, batch: LoraBatch, planes: OwnPlanes, pdl: bool) -> LayerLaunch:
    """The kernels under test, launched as in the engine: one shrink and one expand per group."""

    def launch(layer: int, ys: list[torch.Tensor]) -> None:
        for group, x, plane, y in zip(batch.model.groups, batch.xs, planes.by_group, ys, strict=True):
            call = LoraCall(layer, group, adapters.tables, batch.segments)
            lora_shrink(adapters.pool, x, call, plane, pdl=pdl)
            lora_expand(adapters.pool, plane, call, y, pdl=pdl)

    return launch


def num_stored_layers(adapters: ResidentAdapters) -> int:
    """Number of layers that a method with dense copies stores for these adapters."""
    model = adapters.model
    elements = sum(module.in_features + module.out_features for module in model.modules)
    layer_bytes = len(adapters.ranks) * adapters.max_rank * elements * adapters.pool.adapter.element_size()
    return min(model.num_layers, -(-STORED_BYTES // layer_bytes))


def stacked(adapters: ResidentAdapters, layer: int, module: int, half: int) -> torch.Tensor:
    """A `[N, max_rank, in]` or B `[N, out, max_rank]` of all adapters, zero beyond each adapter's rank."""
    shape = adapters.model.modules[module]
    length = shape.out_features if half == B else shape.in_features
    size = (len(adapters.ranks), adapters.max_rank, length)
    dense = torch.zeros(size, dtype=adapters.pool.adapter.dtype, device=adapters.pool.adapter.device)
    for rank, slots in adapters.slots_by_rank().items():
        dense[slots, :rank] = adapters.rows(layer, module, half, slots, rank)
    return dense.transpose(1, 2).contiguous() if half == B else dense


def joined_a(adapters: ResidentAdapters, layer: int, group: ModuleGroup, is_packed: bool = False) -> torch.Tensor:
    """The A matrices of a group's modules, stacked vertically, `[N, num_modules * max_rank, in]`.

    The modules' matrices start `max_rank` rows apart or, if `is_packed`, as many rows apart as the adapter's rank.
    """
    size = (len(adapters.ranks), len(group.modules) * adapters.max_rank, group.in_features)
    dense = torch.zeros(size, dtype=adapters.pool.adapter.dtype, device=adapters.pool.adapter.device)
    for rank, slots in adapters.slots_by_rank().items():
        distance = rank if is_packed else adapters.max_rank
        for i, module in enumerate(group.modules):
            dense[slots, i * distance : i * distance + rank] = adapters.rows(layer, module, A, slots, rank)
    return dense


def gather_bmm_way(adapters: ResidentAdapters, batch: LoraBatch, num_stored: int) -> LayerLaunch:
    """`index_select` of padded A and B, then `bmm`. Adjacent rows of the same adapter share one copy."""
    model, case, r = adapters.model, batch.case, adapters.max_rank
    slots = torch.arange(case.num_adapters, device=batch.xs[0].device)
    stored = [
        [(joined_a(adapters, layer, group), [stacked(adapters, layer, module, B) for module in group.modules])
         for group in model.groups]
        for layer in range(num_stored)
    ]  # fmt: skip

    def launch(layer: int, ys: list[torch.Tensor]) -> None:
        for group, x, (a, bs), y in zip(model.groups, batch.xs, stored[layer % num_stored], ys, strict=True):
            rows = x.view(case.num_adapters, case.rows_each, group.in_features)
            v = torch.bmm(rows, a.index_select(0, slots).transpose(1, 2))
            for i, b in enumerate(bs):
                change = torch.bmm(v[:, :, i * r : (i + 1) * r], b.index_select(0, slots).transpose(1, 2))
                columns = slice(group.out_offsets[i], group.out_offsets[i] + group.out_features[i])
                y[:, columns].add_(change.flatten(0, 1), alpha=SCALE)

    return launch
