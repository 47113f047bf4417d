"""A mixture of experts: the router of one layer, its experts, and the shared expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from functools import partial

import numpy as np
import torch

from loramux.adapter_store.formats.quantization.mxfp4 import Mxfp4Experts
from loramux.engine.architectures.mixture_config import MixtureConfig
from loramux.engine.decoder.decoder_step import DecoderStep
from loramux.engine.decoder.feed_forward import FeedForward
from loramux.engine.decoder.layer_adapters import LayerAdapters
from loramux.engine.decoder.norms import Norm, RmsNorm
from loramux.engine.decoder.placement import ExpertWeight, Placement
from loramux.engine.sequences.layer_groups import LayerGroups
from loramux.kernels.layout import LinearShape
from loramux.kernels.quantized import QuantizedWeight
from loramux.kernels.tables import ModuleGroup

_ROUTER, _GATE_UP, _DOWN = map(int, (LayerGroups.ROUTER, LayerGroups.EXPERTS_GATE_UP, LayerGroups.EXPERTS_DOWN))


@dataclass(frozen=True, slots=True)
class MixtureGroups:
    """The modules of a mixture, grouped by their input. `gate_up` and `down` list the modules of expert 0."""

    router: ModuleGroup
    gate_up: ModuleGroup
    down: ModuleGroup

    @property
    def all(self) -> tuple[ModuleGroup, ...]:
        return self.router, self.gate_up, self.down


class Mixture:
    """The mixture of one layer. `shared` is the shared expert, or None."""

    def __init__(
        self,
        config: MixtureConfig,
        groups: MixtureGroups,
        shared: FeedForward | None,
        hidden_size: int,
        place: Placement,
        prefix: str,
    ) -> None:
        self.shared = shared
        self._workers = place.backend.workers
        self._groups = groups
        self._routing = config.routing
        self._scales_input = config.scales_input
        num_experts = config.routing.num_experts
        self._choice_bias: torch.Tensor | None = None
        in_router = place
        if config.names.choice_bias is not None:
            bias = place.finite(f"{prefix}.{config.names.choice_bias}", config.choice_bias_shape)
            self._choice_bias = bias.flatten()
            # Routers with such a bias compute their logits in float32, because scores may differ by less than bfloat16
            # can express.
            in_router = replace(place, dtype=torch.float32)
        self._router_norm: Norm | None = None
        if config.names.router_scale is not None:
            scale = place.tensor(f"{prefix}.{config.names.router_scale}", (hidden_size,), torch.float32)
            self._router_norm = RmsNorm(scale * hidden_size**-0.5, place.config.norm_eps)
        self._expert_scales: torch.Tensor | None = None
        if config.names.expert_scales is not None:
            self._expert_scales = place.finite(f"{prefix}.{config.names.expert_scales}", (num_experts,))
        branch = config.names.branch_norms
        self._branch_norms = None
        if branch is not None:
            self._branch_norms = [place.norm(f"{prefix}.{name}", hidden_size) for name in astuple(branch)]
        # One product computes the logits of the experts and of the shared expert's gate.
        self._router = in_router.linear(prefix, config.router_linears(hidden_size), config.names.has_biases)
        self._has_gate = config.shared is not None and config.shared.gate is not None
        gate_up_bias, down_bias = _biases(config, hidden_size, place, prefix)
        gate_up = partial(_gate_up_weights, config, hidden_size, place, prefix)
        down = partial(_down_weights, config, hidden_size, place, prefix)
        self._gate_up = place.experts(num_experts, gate_up, gate_up_bias)
        self._down = place.experts(num_experts, down, down_bias)

    @property
    def groups(self) -> tuple[ModuleGroup, ...]:
        shared = () if self.shared is None else self.shared.groups
        return *shared, *self._groups.all

    @property
    def expert_bytes(self) -> int:
        """Bytes of the tensors of the routed experts, on a device that stores them as records of tensors."""
        num_bytes = 0
        for one in (self._gate_up, self._down):
            assert is_dataclass(one)
            values = (getattr(one, field.name) for field in fields(one))
            num_bytes += sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        return num_bytes

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, step: DecoderStep, adapters: LayerAdapters
    ) -> torch.Tensor:
        """The sum of the outputs of the experts and the shared expert, of which each worker has a part.

        `x` `[num_tokens, hidden_size]` is the normalised `residual`.
        """
        shared = None if self.shared is None else self.shared(x, residual, step, adapters)
        if self._branch_norms is None:
            y = self._experts(x, x, shared, step, adapters)
            return y if self._workers is None else self._workers.sum(y)
        assert shared is not None
        kernels = adapters.kernels
        after_block, before_experts, after_experts = self._branch_norms
        x = before_experts(kernels, residual)
        routed_by = x if self._router_norm is None else self._router_norm(kernels, residual)
        y = after_experts(kernels, self._experts(x, routed_by, None, step, adapters))
        return y.add_(after_block(kernels, shared))

    def _experts(
        self,
        x: torch.Tensor,
        routed_by: torch.Tensor,
        shared: torch.Tensor | None,
        step: DecoderStep,
        adapters: LayerAdapters,
    ) -> torch.Tensor:
        kernels, groups = adapters.kernels, self._groups
        logits = self._router(routed_by if self._choice_bias is None else routed_by.float())
        logits = adapters.add(routed_by, logits, _ROUTER, groups.router)
        num_experts = self._routing.num_experts
        routing = kernels.route(logits[:, :num_experts], self._routing, self._choice_bias, self._expert_scales)
        pairs = adapters.pairs(routing)
        if self._scales_input:
            # Give each pair of token and expert its own row, scaled by the pair's weight.
            x = (x[:, None] * routing.weights[:, :, None].to(x.dtype)).flatten(0, 1)
            routing = replace(routing, weights=torch.ones_like(routing.weights))
        gate_up = kernels.multiply_experts(x, self._gate_up, routing)
        inner = step.activate(adapters.add(x, gate_up, _GATE_UP, groups.gate_up, pairs))
        y = kernels.multiply_experts(inner, self._down, routing)
        y = adapters.add(inner, y, _DOWN, groups.down, pairs)
        return kernels.sum_experts(y, routing, shared, logits[:, num_experts:] if self._has_gate else None)


def mixture_groups(config: MixtureConfig, hidden_size: int, router: ModuleGroup, first_expert: int) -> MixtureGroups:
    """The groups of a mixture. `first_expert` is the index of expert 0's first module along the module axis."""
    *gate_up, down = config.expert_linears(hidden_size)
    stride, size = len(gate_up) + 1, config.expert_size
    return MixtureGroups(
        router=router,
        gate_up=ModuleGroup(
            modules=tuple(range(first_expert, first_expert + len(gate_up))),
            in_features=hidden_size,
            out_features=tuple(linear.out_features for linear in gate_up),
            # The offset of the fused gate and up and, if the file stores them separately, the offsets of gate and of
            # up.
            out_offsets=(0, 0, size)[: len(gate_up)],
            expert_stride=stride,
        ),
        down=ModuleGroup(
            modules=(first_expert + len(gate_up),),
            in_features=down.in_features,
            out_features=(down.out_features,),
            out_offsets=(0,),
            expert_stride=stride,
        ),
    )


def _gate_up_weights(config: MixtureConfig, hidden_size: int, place: Placement, prefix: str) -> Iterator[ExpertWeight]:
    """Each expert's gate and up weights, `[2 * expert_size, hidden_size]`."""
    names, size, num_experts = config.names, config.expert_size, config.routing.num_experts
    if names.has_biases:
        shape = num_experts, hidden_size, 2 * size
        yield from map(_in_halves, _transposed(place, f"{prefix}.{names.experts}.{names.gate}", shape))
        return
    if names.up is None:
        yield from _stacked(config, names.gate, (2 * size, hidden_size), place, prefix)
        return
    for expert in range(num_experts):
        parts = [LinearShape(f"{names.experts}.{expert}.{name}", hidden_size, size) for name in (names.gate, names.up)]
        yield place.fused_weight(prefix, parts)


def _down_weights(config: MixtureConfig, hidden_size: int, place: Placement, prefix: str) -> Iterator[ExpertWeight]:
    """Each expert's down weight, `[hidden_size, expert_size]`."""
    names, size, num_experts = config.names, config.expert_size, config.routing.num_experts
    if names.has_biases:
        yield from _transposed(place, f"{prefix}.{names.experts}.{names.down}", (num_experts, size, hidden_size))
        return
    if names.up is None:
        yield from _stacked(config, names.down, (hidden_size, size), place, prefix)
        return
    for expert in range(num_experts):
        yield place.fused_weight(prefix, [LinearShape(f"{names.experts}.{expert}.{names.down}", size, hidden_size)])


def _transposed(place: Placement, name: str, shape: tuple[int, int, int]) -> Iterator[ExpertWeight]:
    """Each expert's weight `[out_features, in_features]` from a tensor `[num_experts, in_features, out_features]`."""
    stored = place.weights.tensor(name, shape)
    if isinstance(stored, Mxfp4Experts):
        yield from stored.experts
        return
    for one in place.tensor(name, shape):
        yield one.T.contiguous()


def _stacked(
    config: MixtureConfig, name: str, shape: tuple[int, int], place: Placement, prefix: str
) -> Iterator[ExpertWeight]:
    """Each expert's weight, of shape `shape`, from a stacked tensor."""
    names, num_experts = config.names, config.routing.num_experts
    full_name = f"{prefix}.{names.experts}.{name}{names.stack_suffix}"
    if not names.is_transposed:
        yield from place.tensor(full_name, (num_experts, *shape))
        return
    yield from _transposed(place, full_name, (num_experts, shape[1], shape[0]))


def _biases(
    config: MixtureConfig, hidden_size: int, place: Placement, prefix: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The biases of gate and up `[num_experts, 2 * expert_size]` and of down `[num_experts, hidden_size]`, if any."""
    names, size, num_experts = config.names, config.expert_size, config.routing.num_experts
    if not names.has_biases:
        return None, None
    gate_up = place.tensor(f"{prefix}.{names.experts}.{names.gate}_bias", (num_experts, 2 * size))
    down = place.tensor(f"{prefix}.{names.experts}.{names.down}_bias", (num_experts, hidden_size))
    return gate_up[:, _halves(2 * size)].contiguous(), down


def _in_halves(gate_up: ExpertWeight) -> ExpertWeight:
    """Reorder alternating rows of gate and up: first all rows of gate, then all rows of up."""
    order = _halves(gate_up.shape[0])
    return gate_up.outputs(np.array(order)) if isinstance(gate_up, QuantizedWeight) else gate_up[order]


def _halves(num_features: int) -> list[int]:
    return [*range(0, num_features, 2), *range(1, num_features, 2)]
