"""The mixture of experts that a `config.json` describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from loramux.engine.architectures.config_fields import not_negative, positive, positive_float, shown
from loramux.engine.architectures.expert_layers import ExpertLayers, by_step, every_layer
from loramux.engine.architectures.feed_forward import FeedForwardNames, SharedExpert
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.kernels.layout import ExpertLinear, LinearShape
from loramux.kernels.routing_spec import RoutingSpec

MAX_EXPERTS = 1024
"""Maximum number of experts in a layer."""

MAX_CHOSEN = 64
"""Maximum number of experts, and of expert groups, chosen per token. GPU kernels unroll their loops over the chosen
experts.
"""

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Possible names of the field with the number of experts. transformers 5 renames it in the files of some architectures.
"""


@dataclass(frozen=True, slots=True)
class BranchNorms:
    """Names of the norms in a layer whose experts and shared block run in parallel, each with norms of its own.

    The norm before the shared block is `NormNames.before_feed_forward`.
    """

    after_block: str
    before_experts: str
    after_experts: str


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture's tensors, without the layer's prefix.

    Each expert has its own tensors, such as `{experts}.{number}.{gate}.weight`. If `up` is None, each tensor stacks all
    experts instead, and gate and up are fused: `{experts}.{gate}{stack_suffix}` and `{experts}.{down}{stack_suffix}`,
    `[num_experts, out_features, in_features]` or, with `is_transposed`, `[num_experts, in_features, out_features]`.

    With `has_biases`, the router and the experts have biases. The stacked tensors are then always transposed, their
    names have no suffix, and the output features of gate and up alternate.

    `stacked_router` and `stack` are the names of the router and of the stacked experts in transformers 5, and in
    adapters that were trained with it. Without `takes_adapters`, adapters cannot target the experts.

    `choice_bias` names the bias that a router adds to its scores when it chooses experts. With `choice_bias_in_row`,
    the bias is stored as a matrix of one row.

    With a `router_scale`, the router reads the normalised residual, scaled by this tensor. `expert_scales` is a tensor
    with a factor for the weight of each expert.
    """

    router: str
    experts: str
    gate: str
    up: str | None
    down: str
    stacked_router: str
    stack: str
    choice_bias: str | None = None
    choice_bias_in_row: bool = False
    has_biases: bool = False
    stack_suffix: str = ".weight"
    is_transposed: bool = False
    takes_adapters: bool = True
    router_scale: str | None = None
    expert_scales: str | None = None
    branch_norms: BranchNorms | None = None


@dataclass(frozen=True, slots=True)
class SharedTraits:
    """The shared expert of an architecture.

    One block computes all shared experts. Its inner size is the value of `size_field`, times the value of `count_field`
    if there is one. `gate` is the name of a linear layer, or None. The sigmoid of its output scales the block's output.
    """

    block: FeedForwardNames
    size_field: str
    count_field: str | None = None
    gate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureTraits:
    """Traits of an architecture's experts that its `config.json` does not state.

    `assumed_experts` is the number of experts if the file does not state it. `size_field` names the field with the
    inner size of an expert. With `has_groups`, the fields `n_group` and `topk_group` limit the choice, and
    `routed_scaling_factor` scales the weights. With `scales_input`, the weights multiply the inputs of experts, not
    their outputs.
    """

    names: ExpertNames
    assumed_experts: int
    layers: ExpertLayers = every_layer
    size_field: str = "intermediate_size"
    top_k_field: str = "num_experts_per_tok"
    shared: SharedTraits | None = None
    always_normalizes: bool = False
    has_sigmoid: bool = False
    has_groups: bool = False
    min_total_field: str | None = None
    scales_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """The mixture of experts of a model. `layers` are the layers with experts, in ascending order. Other layers have
    one feed-forward block. `expert_size` is the inner size of an expert. `names` are the names of the tensors in a
    file. With `scales_input`, the weights of experts multiply their inputs.
    """

    layers: tuple[int, ...]
    routing: RoutingSpec
    expert_size: int
    shared: SharedExpert | None
    names: ExpertNames
    scales_input: bool

    @property
    def choice_bias_shape(self) -> tuple[int, ...]:
        num_experts = self.routing.num_experts
        return (1, num_experts) if self.names.choice_bias_in_row else (num_experts,)

    def router_linears(self, hidden_size: int) -> list[LinearShape]:
        """The router, and the shared expert's gate if there is one."""
        linears = [LinearShape(self.names.router, hidden_size, self.routing.num_experts)]
        if self.shared is not None and self.shared.gate is not None:
            linears.append(LinearShape(self.shared.gate, hidden_size, 1))
        return linears

    def expert_linears(self, hidden_size: int) -> tuple[ExpertLinear, ...]:
        """The linear layers of each expert: gate and up fused, then gate and up if they have separate tensors, then
        down.
        """
        names, size = self.names, self.expert_size

        def linear(name: str | None, stack: str | None, in_features: int, out_features: int) -> ExpertLinear:
            own = None if name is None or names.up is None else f"{names.experts}.{{}}.{name}"
            has_stack = stack is not None and names.takes_adapters
            return ExpertLinear(own, f"{names.stack}.{stack}" if has_stack else None, in_features, out_features)

        gate_up = replace(linear(None, "gate_up_proj", hidden_size, 2 * size), alternates=names.has_biases)
        parts = () if names.up is None else (names.gate, names.up)
        down = linear(names.down, "down_proj", size, hidden_size)
        return (gate_up, *(linear(name, None, hidden_size, size) for name in parts), down)

    def weight_shapes(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name, without the layer's prefix, and the shape of each tensor of one layer's mixture."""
        names, size, num_experts = self.names, self.expert_size, self.routing.num_experts
        if names.choice_bias is not None:
            yield names.choice_bias, self.choice_bias_shape
        for linear in self.router_linears(hidden_size):
            yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
        if names.has_biases:
            yield f"{names.router}.bias", (num_experts,)
            yield f"{names.experts}.{names.gate}", (num_experts, hidden_size, 2 * size)
            yield f"{names.experts}.{names.gate}_bias", (num_experts, 2 * size)
            yield f"{names.experts}.{names.down}", (num_experts, size, hidden_size)
            yield f"{names.experts}.{names.down}_bias", (num_experts, hidden_size)
            return
        if names.router_scale is not None:
            yield names.router_scale, (hidden_size,)
        if names.expert_scales is not None:
            yield names.expert_scales, (num_experts,)
        if names.branch_norms is not None:
            yield from ((f"{name}.weight", (hidden_size,)) for name in astuple(names.branch_norms))
        if names.up is None:
            for name, outputs, inputs in ((names.gate, 2 * size, hidden_size), (names.down, hidden_size, size)):
                shape = (inputs, outputs) if names.is_transposed else (outputs, inputs)
                yield f"{names.experts}.{name}{names.stack_suffix}", (num_experts, *shape)
            return
        for expert in range(num_experts):
            for name in (names.gate, names.up):
                yield f"{names.experts}.{expert}.{name}.weight", (size, hidden_size)
            yield f"{names.experts}.{expert}.{names.down}.weight", (hidden_size, size)


def parse_mixture(raw: Mapping[str, Any], traits: MixtureTraits, num_layers: int) -> MixtureConfig | None:
    """The model's mixture of experts, or None if no layer has experts. Raises ModelNotSupported."""
    num_experts = _parse_num_experts(raw, traits)
    layers = tuple(layer for layer, has_experts in enumerate(traits.layers(raw, num_layers)) if has_experts)
    if not layers or (num_experts == 0 and traits.layers is by_step):
        return None
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ModelNotSupported(f"the number of experts in config.json, {num_experts}, is not in [1, {MAX_EXPERTS}]")
    return MixtureConfig(
        layers=layers,
        routing=_parse_routing(raw, traits, num_experts),
        expert_size=positive(raw, traits.size_field),
        shared=None if traits.shared is None else _parse_shared(raw, traits.shared),
        names=traits.names,
        scales_input=traits.scales_input,
    )


def _parse_num_experts(raw: Mapping[str, Any], traits: MixtureTraits) -> int:
    given = {name: raw[name] for name in NUM_EXPERTS if raw.get(name) is not None}
    values = list(given.values())
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"the number of experts is {shown(values[0])}, not an integer of at least 0")
    if len(set(values)) > 1:
        raise ModelNotSupported(f"config.json contradicts itself about the number of experts: {given}")
    return values[0] if values else traits.assumed_experts


def _parse_routing(raw: Mapping[str, Any], traits: MixtureTraits, num_experts: int) -> RoutingSpec:
    top_k = positive(raw, traits.top_k_field)
    if top_k > num_experts:
        raise ModelNotSupported(
            f"{traits.top_k_field} is {top_k} in config.json, but a layer has {num_experts} experts"
        )
    num_groups, top_groups = _parse_groups(raw, num_experts, top_k) if traits.has_groups else (1, 1)
    for name, count in ((traits.top_k_field, top_k), ("topk_group", top_groups)):
        if count > MAX_CHOSEN:
            raise ModelNotSupported(f"{name} is {count} in config.json, above {MAX_CHOSEN}")
    return RoutingSpec(
        num_experts,
        top_k,
        normalizes=traits.always_normalizes or bool(raw.get("norm_topk_prob", False)),
        has_sigmoid=traits.has_sigmoid,
        num_groups=num_groups,
        top_groups=top_groups,
        scale=positive_float({"routed_scaling_factor": 1.0, **raw}, "routed_scaling_factor")
        if traits.has_groups
        else 1.0,
        min_total=1e-20 if traits.min_total_field is None else positive_float(raw, traits.min_total_field),
    )


def _parse_groups(raw: Mapping[str, Any], num_experts: int, top_k: int) -> tuple[int, int]:
    """The number of expert groups, and how many of them are chosen per token. (1, 1) if all groups are used."""
    raw = {"n_group": 1, "topk_group": 1, **raw}
    num_groups, top_groups = positive(raw, "n_group"), positive(raw, "topk_group")
    size, rest = divmod(num_experts, num_groups)
    # Groups are ranked by the sum of the scores of their two best experts.
    if rest or (size < 2 and num_groups > 1):
        raise ModelNotSupported(
            f"{num_experts} experts cannot form n_group = {num_groups} groups of two or more experts"
        )
    if top_groups > num_groups or top_groups * size < top_k:
        raise ModelNotSupported(
            f"topk_group is {top_groups} in config.json, but {top_k} experts must be chosen from "
            f"{num_groups} groups of {size} experts"
        )
    return (1, 1) if top_groups == num_groups else (num_groups, top_groups)


def _parse_shared(raw: Mapping[str, Any], traits: SharedTraits) -> SharedExpert | None:
    if traits.gate is not None:
        return SharedExpert(traits.block, positive(raw, traits.size_field), traits.gate)
    count = 1 if traits.count_field is None else not_negative(raw, traits.count_field)
    size = count * not_negative(raw, traits.size_field)
    return SharedExpert(traits.block, size, None) if size else None
