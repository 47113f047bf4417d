"""The adapters of a step in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loramux.engine.sequences.layer_groups import NO_GROUPS, LayerGroups
from loramux.kernels.dispatch import Kernels
from loramux.kernels.routing import Routing
from loramux.kernels.tables import AdapterTables, LoraCall, ModuleGroup, Segments

_EXPERTS = LayerGroups.EXPERTS_GATE_UP | LayerGroups.EXPERTS_DOWN


@dataclass(frozen=True, slots=True, eq=False)
class LayerAdapters:
    """Adds the outputs of a step's adapters in one layer. The adapters change only the module groups in `groups`.

    `slots` int32 `[num_tokens]` is the adapter slot of each row, or -1, and `segments` group the rows by slot.
    """

    kernels: Kernels
    tables: AdapterTables
    slots: torch.Tensor
    segments: Segments
    groups: LayerGroups
    layer: int

    def add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        flag: LayerGroups,
        group: ModuleGroup,
        pairs: Segments | None = None,
    ) -> torch.Tensor:
        """Add the adapters' outputs for `x` to `y`, the base's output. A group of experts also needs `pairs`."""
        if flag in self.groups:
            segments = self.segments if pairs is None else pairs
            self.kernels.lora_add(x, LoraCall(self.layer, group, self.tables, segments), y)
        return y

    def replace_norm(self, y: torch.Tensor, group: ModuleGroup | None) -> torch.Tensor:
        """Turn `y` `[num_tokens, ...]`, the output of the base's norm, into that of the adapters' norms, in place.

        `group` is None if adapters cannot replace this norm.
        """
        if group is not None and LayerGroups.NORMS in self.groups:
            self.kernels.lora_affine(LoraCall(self.layer, group, self.tables, self.segments), y.view(y.shape[0], -1))
        return y

    def pairs(self, routing: Routing) -> Segments | None:
        """The pairs of token and expert, grouped by adapter and expert. None if no adapter changes experts."""
        if self.groups & _EXPERTS == NO_GROUPS:
            return None
        return self.kernels.adapter_pairs(routing, self.slots, self.segments)
