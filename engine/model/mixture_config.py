"""The mixture of experts of a `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loramux.engine.errors import ModelNotSupported
from loramux.engine.model.config_fields import positive, refuse_field, shown
from loramux.kernels.layout import ExpertLinear, LinearShape
from loramux.kernels.routing_spec import RoutingSpec

MAX_EXPERTS = 1024
"""Maximum number of experts in a layer."""

_NUM_EXPERTS = ("num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture's tensors, below the layer.

    Experts have a tensor each, `{experts}.{number}.{gate}.weight` and so on. If `up` is None, the tensors of all
    experts are stacked, with gate and up in one: `{gate}.weight` and `{down}.weight`. `stacked_router` and `stack` are
    the router and the stacked experts in transformers 5, and in the files of adapters that were trained with it.
    """

    router: str
    experts: str
    gate: str
    up: str | None
    down: str
    stacked_router: str
    stack: str


@dataclass(frozen=True, slots=True)
class MixtureTraits:
    """Traits of an architecture that are not in its `config.json`.

    `assumed_experts` is the number of experts if the file does not say it. `size_field` and `shared_size_field` name
    the fields with the inner sizes of an expert and of the shared expert. With `has_dense_layers`,
    `decoder_sparse_step` and `mlp_only_layers` choose the layers with experts.
    """

    names: ExpertNames
    assumed_experts: int
    size_field: str = "intermediate_size"
    shared_size_field: str | None = None
    always_normalizes: bool = False
    has_dense_layers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """The layers in which a router chooses experts for each token.

    `layers` are these layers in ascending order; other layers have one feed-forward block. `shared_size` is the inner
    size of the expert that all tokens use in addition, or None. `names` are those of the tensors in a file.
    """

    layers: tuple[int, ...]
    routing: RoutingSpec
    expert_size: int
    shared_size: int | None
    names: ExpertNames

    def router_linears(self, hidden_size: int) -> list[LinearShape]:
        """The router and, if there is a shared expert, its gate."""
        linears = [LinearShape(self.names.router, hidden_size, self.routing.num_experts)]
        if self.shared_size is not None:
            linears.append(LinearShape("mlp.shared_expert_gate", hidden_size, 1))
        return linears

    def expert_linears(self, hidden_size: int) -> tuple[ExpertLinear, ...]:
        """The linears of each expert: gate and up in one, then each of them if it has tensors of its own, and down."""
        names, size = self.names, self.expert_size

        def linear(name: str | None, stack: str | None, in_features: int, out_features: int) -> ExpertLinear:
            own = None if name is None or names.up is None else f"{names.experts}.{{}}.{name}"
            return ExpertLinear(own, None if stack is None else f"{names.stack}.{stack}", in_features, out_features)

        gate_up = linear(None, "gate_up_proj", hidden_size, 2 * size)
        parts = () if names.up is None else (names.gate, names.up)
        down = linear(names.down, "down_proj", size, hidden_size)
        return (gate_up, *(linear(name, None, hidden_size, size) for name in parts), down)

    def weight_shapes(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name, below the layer, and the shape of each tensor of one layer's mixture."""
        for linear in self.router_linears(hidden_size):
            yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
        names, size, num_experts = self.names, self.expert_size, self.routing.num_experts
        if names.up is None:
            yield f"{names.experts}.{names.gate}.weight", (num_experts, 2 * size, hidden_size)
            yield f"{names.experts}.{names.down}.weight", (num_experts, hidden_size, size)
            return
        for expert in range(num_experts):
            for name in (names.gate, names.up):
                yield f"{names.experts}.{expert}.{name}.weight", (size, hidden_size)
            yield f"{names.experts}.{expert}.{names.down}.weight", (hidden_size, size)


def parse_mixture(raw: Mapping[str, Any], traits: MixtureTraits, num_layers: int) -> MixtureConfig | None:
    """The mixture of a model, or None if no layer has one. Raises ModelNotSupported."""
    num_experts = _parse_num_experts(raw, traits)
    layers = tuple(range(num_layers))
    if traits.has_dense_layers:
        step = positive({"decoder_sparse_step": 1, **raw}, "decoder_sparse_step")
        dense = _parse_dense_layers(raw, num_layers)
        layers = tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0 and num_experts)
    if not layers:
        return None
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ModelNotSupported(f"{num_experts} experts in config.json are not in [1, {MAX_EXPERTS}]")
    top_k = positive(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelNotSupported(f"num_experts_per_tok is {top_k} in config.json, but a layer has {num_experts} experts")
    normalizes = traits.always_normalizes or bool(raw.get("norm_topk_prob", False))
    return MixtureConfig(
        layers=layers,
        routing=RoutingSpec(num_experts, top_k, normalizes),
        expert_size=positive(raw, traits.size_field),
        shared_size=None if traits.shared_size_field is None else positive(raw, traits.shared_size_field),
        names=traits.names,
    )


def _parse_num_experts(raw: Mapping[str, Any], traits: MixtureTraits) -> int:
    """The number of experts. transformers 5 saves it under another name for some architectures."""
    given = {name: raw[name] for name in _NUM_EXPERTS if raw.get(name) is not None}
    values = list(given.values())
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"the number of experts is {shown(values[0])}, not an integer of at least 0")
    if len(set(values)) > 1:
        raise ModelNotSupported(f"config.json contradicts itself about the number of experts: {given}")
    return values[0] if values else traits.assumed_experts


def _parse_dense_layers(raw: Mapping[str, Any], num_layers: int) -> set[int]:
    layers = raw.get("mlp_only_layers") or []
    if any(type(layer) is not int or not 0 <= layer < num_layers for layer in layers):
        refuse_field("mlp_only_layers", layers, "a model with " + str(num_layers) + " layers")
    return set(layers)
