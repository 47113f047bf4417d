"""The adapters of a step in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loramux.engine.device.backend import AddingLinear, DenseLinear, Linear
from loramux.engine.device.worker_group import WorkerGroup
from loramux.engine.sequences.layer_groups import LayerGroups
from loramux.kernels.dispatch import Kernels
from loramux.kernels.routing import Routing
from loramux.kernels.tables import AdapterTables, LoraCall, ModuleGroup, Segments

_EXPERTS = int(LayerGroups.EXPERTS_GATE_UP | LayerGroups.EXPERTS_DOWN)


# Not frozen, because each layer of each step makes one, and making a frozen one takes several times as long.
@dataclass(slots=True, eq=False)
class LayerAdapters:
    """Adds the outputs of a step's adapters in one layer. The adapters change only the module groups in `groups`.

    `slots` int32 `[num_tokens]` is the adapter slot of each row, or -1, and `segments` group the rows by slot.
    `groups` has the bits of `LayerGroups` as a plain integer, which Python tests much faster than a flag.
    `replaces_norms` is true if `groups` contains NORMS. `expands_first` is `StepInputs.expands_first`.
    """

    kernels: Kernels
    tables: AdapterTables
    slots: torch.Tensor
    segments: Segments
    groups: int
    replaces_norms: bool
    expands_first: bool
    layer: int

    def add(
        self, x: torch.Tensor, y: torch.Tensor, flag: int, group: ModuleGroup, pairs: Segments | None = None
    ) -> torch.Tensor:
        """Add the adapters' outputs for `x` to `y`, the output of a router or, with `pairs`, of experts."""
        if self.groups & flag:
            segments = self.segments if pairs is None else pairs
            self.kernels.lora_add(x, LoraCall(self.layer, group, self.tables, segments), y)
        return y

    def replace_norm(self, y: torch.Tensor, group: ModuleGroup | None) -> torch.Tensor:
        """Turn `y` `[num_tokens, ...]`, the output of the base's norm, into that of the adapters' norms, in place.

        `group` is None if adapters cannot replace this norm.
        """
        if self.replaces_norms and group is not None:
            self.kernels.lora_affine(LoraCall(self.layer, group, self.tables, self.segments), y.view(y.shape[0], -1))
        return y

    def pairs(self, routing: Routing) -> Segments | None:
        """The pairs of token and expert, grouped by adapter and expert. None if no adapter changes experts."""
        if not self.groups & _EXPERTS:
            return None
        return self.kernels.adapter_pairs(routing, self.slots, self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptableLinear:
    """A linear layer, which may be several fused ones, and the modules with which adapters change its output.

    `adding` is the layer if it can add its product to the adapters' outputs, and None otherwise.
    """

    linear: Linear
    group: ModuleGroup
    flag: int
    adding: AddingLinear | None

    def __call__(self, x: torch.Tensor, adapters: LayerAdapters) -> torch.Tensor:
        kernels = adapters.kernels
        if not adapters.groups & self.flag:
            return kernels.multiply(self.linear, x)
        call = LoraCall(adapters.layer, self.group, adapters.tables, adapters.segments)
        if isinstance(self.linear, DenseLinear) and x.shape[0] <= kernels.max_fused_rows:
            return kernels.lora_linear(x, self.linear.weight, self.linear.bias, call, adapters.slots)
        if adapters.expands_first and self.adding is not None:
            y = x.new_empty(x.shape[0], self.group.total_out)
            kernels.lora_delta(x, call, adapters.slots, y)
            self.adding.add_to(x, y)
            return y
        y = kernels.multiply(self.linear, x)
        kernels.lora_add(x, call, y)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class SummedLinear(AdaptableLinear):
    """A linear layer whose inputs are divided among the workers. The outputs of all workers, with those of their
    adapters, are added up.
    """

    workers: WorkerGroup

    def __call__(self, x: torch.Tensor, adapters: LayerAdapters) -> torch.Tensor:
        return self.workers.sum(AdaptableLinear.__call__(self, x, adapters))
