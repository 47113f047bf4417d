"""Loads the decoder's layers, and numbers the modules with which adapters change them."""

from __future__ import annotations

from loramux.engine.architectures.delta_config import DELTA_NORM
from loramux.engine.architectures.feed_forward_config import XIELU
from loramux.engine.architectures.model_config import INPUT_NORM, LAYER_SCALAR, ModelConfig
from loramux.engine.decoder.altup import AltUpLayer, sparsity_multiplier
from loramux.engine.decoder.attention import Attention, load_attention
from loramux.engine.decoder.delta_net import DeltaNet
from loramux.engine.decoder.feed_forward import FeedForward, Xielu
from loramux.engine.decoder.layer_adapters import AdaptableLinear, SummedLinear
from loramux.engine.decoder.layer_inputs import LayerInput
from loramux.engine.decoder.layers import (
    AttentionBlock,
    DecoderLayer,
    FeedForwardBlock,
    ParallelLayer,
    ScaledLayer,
    SequentialLayer,
    StreamsLayer,
)
from loramux.engine.decoder.mixture import Mixture, mixture_groups
from loramux.engine.decoder.norms import AdaptableNorm, NoNorm
from loramux.engine.decoder.placement import Placement
from loramux.engine.device.backend import AddingLinear
from loramux.engine.device.worker_group import WorkerGroup
from loramux.engine.sequences.cache_groups import CacheLayout
from loramux.engine.sequences.layer_groups import LayerGroups
from loramux.kernels.layout import LinearShape
from loramux.kernels.tables import ModuleGroup


def all_module_groups(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """The indices of each group of `LayerGroups`: first `ModelConfig.module_groups`, then the groups of the experts and
    `ModelConfig.input_groups`, and the norms.
    """
    gate_up: list[int] = []
    down: list[int] = []
    if config.experts is not None:
        first, num_linears = len(config.modules), len(config.experts.linears)
        for expert in range(config.experts.num_experts):
            of_expert = [first + config.experts.index(expert, linear) for linear in range(num_linears)]
            gate_up += of_expert[:-1]
            down.append(of_expert[-1])
    norms = range(config.first_norm, config.first_norm + len(config.norm_shapes))
    return (*config.module_groups, tuple(gate_up), tuple(down), *config.input_groups, tuple(norms))


def norm_groups(config: ModelConfig, layer: int) -> dict[str, ModuleGroup]:
    """The modules with which adapters replace a layer's norms, by the norm's name."""
    shapes = enumerate((norm.linear for norm in config.norm_shapes), config.first_norm)
    return {
        shape.name: ModuleGroup((index,), shape.in_features, (shape.out_features,), (0,))
        for index, shape in shapes
        if shape.is_in(layer)
    }


def module_group(shapes: tuple[LinearShape, ...], modules: tuple[int, ...]) -> ModuleGroup:
    members = [shapes[module] for module in modules]
    out_features = tuple(shape.out_features for shape in members)
    return ModuleGroup(
        modules=modules,
        in_features=members[0].in_features,
        out_features=out_features,
        out_offsets=tuple(sum(out_features[:i]) for i in range(len(modules))),
        is_embedding=members[0].is_embedding,
    )


class LayerLoader:
    """Loads one layer. `rotary` is the index of its rotary embedding."""

    def __init__(
        self, config: ModelConfig, place: Placement, index: int, rotary: int, window: int | None, cache: CacheLayout
    ) -> None:
        self._config, self._place, self._index = config, place, index
        self._rotary, self._window, self._cache = rotary, window, cache
        self._prefix = f"model.layers.{index}"
        self._norm_groups = norm_groups(config, index)

    def load(self) -> DecoderLayer:
        config, place = self._config, self._place
        attention, feed_forward, layer_input = self._attention(), self._feed_forward(), self._layer_input()
        if config.altup is not None:
            altup = AltUpLayer(config.altup, config.hidden_size, place, self._prefix)
            return StreamsLayer(self._norm_groups, attention, feed_forward, layer_input, altup)
        if config.has_layer_scalars or layer_input is not None:
            scalar = place.finite(f"{self._prefix}.{LAYER_SCALAR}", (1,)).item() if config.has_layer_scalars else 1.0
            return ScaledLayer(self._norm_groups, attention, feed_forward, layer_input, scalar)
        kind = ParallelLayer if config.parallel_blocks else SequentialLayer
        return kind(self._norm_groups, attention, feed_forward, None)

    def _attention(self) -> AttentionBlock:
        config, place, index = self._config, self._place, self._index
        qkv, o, *_ = config.layer_groups(index)
        has_attention = config.has_attention(index)
        mixer: Attention | DeltaNet
        if has_attention:
            mixer = load_attention(config, place, index, self._rotary, self._window, self._cache, self._norm_groups)
        else:
            assert config.delta is not None
            own_index = config.delta.layers.index(index)
            group = self._norm_groups.get(DELTA_NORM)
            mixer = DeltaNet(config.delta, config.norm_eps, place, self._prefix, own_index, group)
        return AttentionBlock(
            norm=self._norm(config.norms.before_attention) or AdaptableNorm(NoNorm(), None),
            qkv=self._linear(qkv, LayerGroups.QKV, config.attention.qkv_bias and has_attention),
            mixer=mixer,
            o=self._linear(o, LayerGroups.O, config.attention.o_bias and has_attention, place.backend.workers),
            output_norm=self._norm(config.norms.after_attention),
            scale=config.residual_scale,
        )

    def _feed_forward(self) -> FeedForwardBlock:
        config, workers = self._config, self._place.backend.workers
        has_experts = config.mixture is not None and self._index in config.mixture.layers
        # The outputs of a shared expert are added up together with those of the other experts.
        shared = self._dense(None if has_experts else workers)
        inner: FeedForward | Mixture | None = shared
        if has_experts:
            assert config.mixture is not None
            *_, router = config.layer_groups(self._index)
            groups = mixture_groups(
                config.mixture,
                config.hidden_size,
                module_group(config.modules, router),
                first_expert=len(config.modules),
            )
            inner = Mixture(config.mixture, groups, shared, config.hidden_size, self._place, self._prefix)
        assert inner is not None, "each layer has a feed-forward block or experts"
        return FeedForwardBlock(
            norm=self._norm(config.norms.before_feed_forward) or AdaptableNorm(NoNorm(), None),
            inner=inner,
            output_norm=self._norm(config.norms.after_feed_forward),
            scale=config.residual_scale,
        )

    def _dense(self, workers: WorkerGroup | None) -> FeedForward | None:
        """The block that all tokens use, or None if the layer has only experts. `workers` add up its outputs."""
        config = self._config
        _, _, gate_up, down, _ = config.layer_groups(self._index)
        if not gate_up:
            return None
        sparsity = 0.0 if config.altup is None else config.altup.sparsities[self._index]
        return FeedForward(
            gate_up=self._linear(gate_up, LayerGroups.GATE_UP, config.mlp_bias),
            down=self._linear(down, LayerGroups.DOWN, config.mlp_bias, workers),
            xielu=Xielu(self._place, self._prefix) if config.activation == XIELU else None,
            sparsity=sparsity_multiplier(sparsity) if sparsity else None,
        )

    def _layer_input(self) -> LayerInput | None:
        config = self._config
        if not config.layer_input_size:
            return None
        gate, projection, _ = config.input_groups
        return LayerInput(
            gate=self._linear(gate, LayerGroups.INPUT_GATE),
            projection=self._linear(projection, LayerGroups.INPUT_PROJECTION),
            norm=self._place.norm(f"{self._prefix}.{INPUT_NORM}", config.hidden_size),
        )

    def _linear(
        self,
        modules: tuple[int, ...],
        flag: LayerGroups,
        has_bias: bool = False,
        workers: WorkerGroup | None = None,
    ) -> AdaptableLinear:
        """Load linear layers that share an input. If `workers` is not None, they add up their outputs."""
        shapes = self._config.modules
        linear = self._place.linear(self._prefix, [shapes[module] for module in modules], has_bias)
        adding = linear if isinstance(linear, AddingLinear) and not has_bias else None
        group = module_group(shapes, modules)
        if workers is not None:
            return SummedLinear(linear, group, int(flag), adding, workers)
        return AdaptableLinear(linear, group, int(flag), adding)

    def _norm(self, name: str | None) -> AdaptableNorm | None:
        if name is None:
            return None
        norm = self._place.norm(f"{self._prefix}.{name}", self._config.hidden_size)
        return AdaptableNorm(norm, self._norm_groups.get(name))
