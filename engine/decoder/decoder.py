"""The decoder: one transformer for all architectures, with all of a batch's adapters applied in one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from loramux.engine.architectures.delta_config import DELTA_NORM
from loramux.engine.architectures.feed_forward_config import GELU_TANH, XIELU
from loramux.engine.architectures.model_config import EMBEDDING, HEAD, INPUT_NORM, LAYER_SCALAR, ModelConfig
from loramux.engine.architectures.weight_files import HEAD_BIAS
from loramux.engine.decoder.altup import AltUp, AltUpLayer, sparse_gate, sparsity_multiplier
from loramux.engine.decoder.attention import Attention, AttentionStep, load_attention
from loramux.engine.decoder.delta_net import DeltaNet
from loramux.engine.decoder.layer_adapters import LayerAdapters
from loramux.engine.decoder.layer_inputs import LayerInput, LayerInputs
from loramux.engine.decoder.mixture import Mixture, mixture_groups
from loramux.engine.decoder.norms import NoNorm, Norm
from loramux.engine.decoder.placement import Placement
from loramux.engine.decoder.rotary import growing_scales, query_scales, rotary_tables
from loramux.engine.decoder.vocabularies import Vocabularies
from loramux.engine.decoder.weights import WeightSource
from loramux.engine.decoder.xielu import Xielu
from loramux.engine.device.backend import Backend, Linear
from loramux.engine.sequences.batch import StepInputs
from loramux.engine.sequences.cache_groups import (
    CacheLayout,
    cache_layout,
    hybrid_layout,
    narrow_windows,
    uneven_layout,
)
from loramux.engine.sequences.layer_groups import NO_GROUPS, LayerGroups
from loramux.kernels.dispatch import Kernels, KernelShapes
from loramux.kernels.layout import LinearShape
from loramux.kernels.tables import AdapterTables, LoraCall, ModuleGroup, Segments


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer. q/k/v are fused into one linear layer.

    `norm_groups` has the modules with which adapters replace the layer's norms, by the norm's name.
    A layer with a `mixture` has a `feed_forward` only if it has a shared expert. A layer with a `delta` has no
    `attention`. Its `qkv` and `o` are the input and output projections of the delta rule.

    Output norms apply to the outputs of the attention and feed-forward blocks before they are added to the residual.
    `layer_input` adds a projection of the layer's own input embedding to the layer's output. Then `scalar` multiplies
    the residual. With `altup`, the layer has several residuals.
    """

    norm_groups: Mapping[str, ModuleGroup]
    attention_norm: Norm
    qkv: Linear
    qkv_group: ModuleGroup
    attention: Attention | None
    delta: DeltaNet | None
    o: Linear
    o_group: ModuleGroup
    attention_output_norm: Norm | None
    feed_forward_norm: Norm
    feed_forward: FeedForward | None
    mixture: Mixture | None
    feed_forward_output_norm: Norm | None
    layer_input: LayerInput | None
    scalar: float
    altup: AltUpLayer | None

    def norm_group(self, name: str | None) -> ModuleGroup | None:
        """The module with which adapters replace a norm, or None if the layer or the adapters lack the norm."""
        return None if name is None else self.norm_groups.get(name)


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """A feed-forward block that all tokens use, with gate/up fused: a dense layer's block, or the shared expert.

    `xielu` is the layer's own activation, or None. `sparsity` is the multiplier of `sparse_gate`, or None.
    """

    gate_up: Linear
    gate_up_group: ModuleGroup
    down: Linear
    down_group: ModuleGroup
    xielu: Xielu | None
    sparsity: float | None


@dataclass(frozen=True, slots=True, eq=False)
class HeadAdapters:
    """Inputs for the head's adapters: `segments` cover the rows of `hidden` whose adapters modify the head.

    None of these adapters replaces more than `max_rows` rows of the head. `vocabularies` is None if all of them have
    the base's vocabulary.
    """

    kernels: Kernels
    tables: AdapterTables
    segments: Segments
    max_rows: int = 0
    vocabularies: Vocabularies | None = None


class Decoder:
    """A decoder-only model on one device. Its output depends only on its inputs, the pool and the tables.

    Activations are float32 on a CPU and have the weights' dtype on a GPU. `hidden` can be captured as a CUDA graph.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, max_len: int, backend: Backend
    ) -> None:
        self.config = config
        self._dtype = backend.activation_dtype or dtype
        self._embedding_group, self._head_group = (
            _group(config.outer_modules, (module,)) for module in (EMBEDDING, HEAD)
        )
        self._module_groups = tuple(np.array(group, np.intp) for group in all_module_groups(config))
        place = Placement(weights, dtype, backend, config)
        self._embedding = place.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        # Round the scale to the dtype of the weights before multiplying, as transformers does.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self._altup = None if config.altup is None else AltUp(config.altup, config.hidden_size, place)
        self._layer_inputs = LayerInputs(config, place) if config.layer_input_size else None
        attention = config.attention
        head_dims = [heads.head_dim for heads in attention.layer_heads]
        layer_ropes = list(zip(attention.ropes, head_dims, strict=True))
        ropes = list(dict.fromkeys(layer_ropes))
        # Kernels need no mask for a window that covers every context.
        windows = narrow_windows(attention.windows, max_len)
        self.cache_layout = cache_layout(windows, max_len)
        if attention.has_uneven_cache:
            widths = [heads.width for heads in attention.layer_heads]
            self.cache_layout = uneven_layout(windows, widths, attention.kv_sources)
        if config.delta is not None:
            num_state_pages = config.num_state_pages(config.geometry(dtype.itemsize, dtype.itemsize))
            self.cache_layout = hybrid_layout(config.num_layers, config.delta.attention_layers, num_state_pages)
        self._layers = [
            _load_layer(config, place, layer, ropes.index(layer_ropes[layer]), windows[layer], self.cache_layout)
            for layer in range(config.num_layers)
        ]
        self._final_norm = place.norm(config.final_norm, config.hidden_size)
        self._final_norm_group = _norm_groups(config, config.num_layers - 1).get(config.final_norm)
        if config.tied_embeddings:
            head_bias = place.tensor(HEAD_BIAS, (config.vocab_size,)) if config.head_bias else None
            self._head = backend.make_linear(self._embedding, head_bias)
        else:
            self._head = place.linear("", [config.outer_modules[HEAD]], config.head_bias)
        self._head_dims = sorted(set(head_dims))
        self._rotary = [
            (cos.to(backend.device), sin.to(backend.device))
            for cos, sin in (rotary_tables(rope, head_dim, max_len) for rope, head_dim in ropes)
        ]
        scales = query_scales(ropes[0][0], max_len)
        if attention.query_scaling is not None:
            scales = growing_scales(attention.query_scaling, max_len)
        self._query_scales = None if scales is None else scales.to(backend.device, self._dtype)

    @property
    def module_groups(self) -> tuple[npt.NDArray[np.intp], ...]:
        """For each group in `LayerGroups`, the indices of its modules along the module axis.

        A group that no layer has is empty.
        """
        return self._module_groups

    @property
    def shapes(self) -> KernelShapes:
        """The shapes that the kernels must support."""
        groups: list[ModuleGroup] = []
        for layer in self._layers:
            groups += (layer.qkv_group, layer.o_group)
            if layer.feed_forward is not None:
                groups += (layer.feed_forward.gate_up_group, layer.feed_forward.down_group)
            if layer.mixture is not None:
                groups += layer.mixture.groups.all
            if layer.layer_input is not None:
                groups += (layer.layer_input.gate_group, layer.layer_input.projection_group)
            groups += layer.norm_groups.values()
        return KernelShapes(
            groups=tuple(dict.fromkeys(groups)),
            attention=tuple(layer.attention.spec for layer in self._layers if layer.attention is not None),
            outer_groups=(self._embedding_group, self._head_group),
            delta=None if self.config.delta is None else self.config.delta.spec,
        )

    @property
    def outer_factors(self) -> tuple[float, ...]:
        """Factors applied to the outputs of `config.outer_modules`, for the base and for adapters."""
        return (self._embedding_scale, 1.0)

    def with_few_layers(self) -> Decoder:
        """A copy that shares the weights but has only one layer of each kind, to launch every kernel in less time."""
        few = copy.copy(self)
        few._layers = list({_kind(layer): layer for layer in self._layers}.values())
        return few

    @torch.inference_mode()
    def embed(self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables) -> torch.Tensor:
        """Embeddings of a step's tokens with their adapters applied, `[num_tokens, hidden_size]`."""
        tokens, segments = inputs.tokens, inputs.embedding_segments
        is_adapted = segments is not None and segments.num_segments > 0
        if is_adapted:
            # For tokens beyond the base's vocabulary, an adapter's rows replace the row that is read here.
            tokens = tokens.clamp(max=self.config.vocab_size - 1)
        embedded = functional.embedding(tokens, self._embedding)
        if segments is not None and is_adapted:
            assert tables.trained_rows is not None
            call = LoraCall(0, self._embedding_group, tables.trained_rows, segments)
            kernels.outer.replace_rows(inputs.tokens, call, embedded)
        if self._embedding_scale != 1.0:
            embedded = embedded * self._embedding_scale
        embedded = embedded.to(self._dtype)
        if segments is not None and is_adapted:
            call = LoraCall(0, self._embedding_group, _outer(tables), segments)
            planes = kernels.outer.lora_planes(call, embedded.shape[0])
            kernels.outer.lora_gather(inputs.tokens, call, planes)
            kernels.outer.lora_expand(planes, call, embedded)
        return embedded

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables) -> torch.Tensor:
        """Run one step and return the normalised output of the last layer at the sample rows, `[num_samples,
        hidden_size]`.
        """
        config, residual_scale = self.config, self.config.residual_scale
        num_tokens = inputs.tokens.shape[0]
        activate = _activation(config, kernels)
        residual = self.embed(inputs, kernels, tables)
        attention = AttentionStep(
            angles=[(cos[inputs.positions], sin[inputs.positions]) for cos, sin in self._rotary],
            query_scale=None if self._query_scales is None else self._query_scales[inputs.positions],
            batches=inputs.attention,
            outputs={
                head_dim: residual.new_zeros(num_tokens, config.attention.num_heads, head_dim)
                for head_dim in self._head_dims
            },
        )
        layer_inputs = None
        if self._layer_inputs is not None:
            layer_inputs = self._layer_inputs(inputs.tokens, residual, kernels)

        # The module groups that this step's adapters modify.
        adapted = inputs.groups if inputs.segments.num_segments else NO_GROUPS
        has_own_norms = LayerGroups.NORMS in adapted

        def feed_forward(x: torch.Tensor, layer: DecoderLayer, adapters: LayerAdapters) -> torch.Tensor:
            block, out = layer.feed_forward, None
            if block is not None:
                inner = adapters.add(x, block.gate_up(x), LayerGroups.GATE_UP, block.gate_up_group)
                if block.sparsity is not None:
                    inner = sparse_gate(inner, block.sparsity)
                inner = activate(inner) if block.xielu is None else block.xielu(inner)
                out = adapters.add(inner, block.down(inner), LayerGroups.DOWN, block.down_group)
            if layer.mixture is not None:
                out = layer.mixture(x, residual, out, kernels, activate, adapters)
            assert out is not None, "each layer has a feed-forward block or experts"
            return out

        streams = None if self._altup is None else self._altup.expand(residual)

        # The output of the previous block, if it still has to be added to the residual.
        x: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            adapters = LayerAdapters(kernels, tables, inputs.slots, inputs.segments, adapted, index)
            if layer.altup is not None:
                assert streams is not None
                streams = layer.altup.predict(streams, kernels)
                residual, x = streams[0].clone(), None
            norm = layer.attention_norm
            x = norm(kernels, residual) if x is None else norm.add(kernels, x, residual)
            norm_adapters = adapters if has_own_norms else None
            if has_own_norms:
                x = adapters.replace_norm(x, layer.norm_group(config.norms.before_attention))
            qkv = adapters.add(x, layer.qkv(x), LayerGroups.QKV, layer.qkv_group)
            normed = x
            if layer.attention is not None:
                x = layer.attention(qkv, kernels, attention, norm_adapters)
            else:
                assert layer.delta is not None
                assert inputs.states is not None
                x = layer.delta(qkv, kernels, inputs.states, norm_adapters)
            x = adapters.add(x, layer.o(x), LayerGroups.O, layer.o_group)
            if layer.attention_output_norm is not None:
                x = layer.attention_output_norm(kernels, x)
                if has_own_norms:
                    x = adapters.replace_norm(x, layer.norm_group(config.norms.after_attention))
            if residual_scale != 1.0:
                x.mul_(residual_scale)
            attention_output = x
            if layer.altup is not None:
                residual.add_(x).add_(layer.altup.laurel(normed, kernels)).mul_(0.5**0.5)
                x = layer.feed_forward_norm(kernels, residual)
            else:
                x = normed if config.parallel_blocks else layer.feed_forward_norm.add(kernels, x, residual)
            if has_own_norms:
                x = adapters.replace_norm(x, layer.norm_group(config.norms.before_feed_forward))
            x = feed_forward(x, layer, adapters)
            if layer.feed_forward_output_norm is not None:
                x = layer.feed_forward_output_norm(kernels, x)
                if has_own_norms:
                    x = adapters.replace_norm(x, layer.norm_group(config.norms.after_feed_forward))
            if residual_scale != 1.0:
                x.mul_(residual_scale)
            if config.parallel_blocks:
                x.add_(attention_output)
            if layer.altup is not None:
                assert streams is not None
                assert layer.layer_input is not None
                assert layer_inputs is not None
                streams = layer.altup.correct(streams, residual.add_(x), kernels)
                gated = layer.altup.gate_input(streams[0])
                streams[1:] += layer.layer_input(gated, layer_inputs[:, index], kernels, adapters)
            elif layer.layer_input is not None:
                assert layer_inputs is not None
                residual.add_(x)
                x = layer.layer_input(residual, layer_inputs[:, index], kernels, adapters)
            if layer.scalar != 1.0:
                residual.add_(x).mul_(layer.scalar)
                x = None
        # Adapters replace the final norm in all rows, because their segments list the step's rows.
        rows = slice(None) if has_own_norms else inputs.sample_rows
        if self._altup is not None:
            assert streams is not None
            hidden = self._final_norm(kernels, self._altup.join(streams[:, rows]))
        elif x is None:
            hidden = self._final_norm(kernels, residual[rows])
        else:
            hidden = self._final_norm.add(kernels, x[rows], residual[rows])
        if has_own_norms:
            last = LayerAdapters(kernels, tables, inputs.slots, inputs.segments, adapted, config.num_layers - 1)
            hidden = last.replace_norm(hidden, self._final_norm_group)[inputs.sample_rows]
        return hidden

    @torch.inference_mode()
    def launch_norms(self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables) -> None:
        """Launch the kernels with which adapters replace norms of each width, on zeros."""
        groups = (group for layer in self._layers for group in layer.norm_groups.values())
        for group in {group.total_out: group for group in groups}.values():
            y = torch.zeros(len(inputs.tokens), group.total_out, dtype=self._dtype, device=self._embedding.device)
            kernels.lora_affine(LoraCall(0, group, tables, inputs.segments), y)

    def new_hidden(self, num_rows: int) -> torch.Tensor:
        """Allocate memory for `num_rows` rows of the output of `hidden`."""
        return torch.empty(num_rows, self.config.hidden_size, dtype=self._dtype, device=self._embedding.device)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, adapters: HeadAdapters | None = None) -> torch.Tensor:
        """Logits of rows of `hidden`, `[num_rows, num_columns]`, in the dtype of the activations.

        `adapters` is None if no row's adapter modifies the head. There is a column for each token of the base and, if
        an adapter has further tokens, MAX_EXTRA_TOKENS more. The logits of tokens that a row's adapter lacks are
        FORBIDDEN.
        """
        logits = self._head(hidden)
        vocabularies = None if adapters is None else adapters.vocabularies
        if vocabularies is not None:
            logits = vocabularies.widened(logits)
        if adapters is not None and adapters.segments.num_segments:
            if adapters.max_rows:
                assert adapters.tables.trained_rows is not None
                segments = replace(adapters.segments, max_rank=adapters.max_rows)
                call = LoraCall(0, self._head_group, adapters.tables.trained_rows, segments)
                adapters.kernels.outer.replace_columns(hidden, call, logits)
            call = LoraCall(0, self._head_group, _outer(adapters.tables), adapters.segments)
            adapters.kernels.outer.lora_add(hidden, call, logits)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        cap = self.config.logit_soft_cap
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)
        if vocabularies is not None:
            vocabularies.forbid_others(logits)
        return logits


def _activation(config: ModelConfig, kernels: Kernels) -> Callable[[torch.Tensor], torch.Tensor]:
    clamped = config.clamped_gate
    if clamped is not None:
        return lambda x: kernels.clamped_silu_and_mul(x, clamped.alpha, clamped.limit)
    if config.feed_forward.has_gate:
        return kernels.gelu_and_mul if config.activation == GELU_TANH else kernels.silu_and_mul
    if config.activation == GELU_TANH:
        return lambda x: functional.gelu(x, approximate="tanh")
    return lambda x: functional.relu(x).square_()


def _sparsity(config: ModelConfig, layer: int) -> float | None:
    sparsity = 0.0 if config.altup is None else config.altup.sparsities[layer]
    return sparsity_multiplier(sparsity) if sparsity else None


def _kind(layer: DecoderLayer) -> tuple[object, ...]:
    """A key that is equal for layers that launch the same kernels."""
    attention = None if layer.attention is None else (layer.attention.spec, layer.attention.stores_kv)
    return attention, layer.feed_forward is None, layer.mixture is None


def _outer(tables: AdapterTables) -> AdapterTables:
    assert tables.outer is not None, "segments of outer modules come with their tables"
    return tables.outer


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


def _norm_groups(config: ModelConfig, layer: int) -> dict[str, ModuleGroup]:
    """The modules with which adapters replace a layer's norms, by the norm's name."""
    shapes = enumerate((norm.linear for norm in config.norm_shapes), config.first_norm)
    return {
        shape.name: ModuleGroup((index,), shape.in_features, (shape.out_features,), (0,))
        for index, shape in shapes
        if shape.is_in(layer)
    }


def _group(shapes: tuple[LinearShape, ...], modules: tuple[int, ...]) -> ModuleGroup:
    members = [shapes[module] for module in modules]
    out_features = tuple(shape.out_features for shape in members)
    return ModuleGroup(
        modules=modules,
        in_features=members[0].in_features,
        out_features=out_features,
        out_offsets=tuple(sum(out_features[:i]) for i in range(len(modules))),
        is_embedding=members[0].is_embedding,
    )


def _load_layer(
    config: ModelConfig, place: Placement, index: int, rotary: int, window: int | None, cache: CacheLayout
) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    hidden_size = config.hidden_size
    qkv, o, gate_up, down, router = config.layer_groups(index)
    modules = config.modules

    def linear(group: tuple[int, ...], has_bias: bool) -> Linear:
        return place.linear(prefix, [modules[module] for module in group], has_bias)

    def norm(name: str | None) -> Norm | None:
        return None if name is None else place.norm(f"{prefix}.{name}", hidden_size)

    block = None
    if gate_up:
        block = FeedForward(
            gate_up=linear(gate_up, config.mlp_bias),
            gate_up_group=_group(modules, gate_up),
            down=linear(down, config.mlp_bias),
            down_group=_group(modules, down),
            sparsity=_sparsity(config, index),
            xielu=Xielu(place, prefix) if config.activation == XIELU else None,
        )
    mixture = None
    if config.mixture is not None and index in config.mixture.layers:
        groups = mixture_groups(config.mixture, hidden_size, _group(modules, router), first_expert=len(modules))
        mixture = Mixture(config.mixture, groups, hidden_size, place, prefix)
    has_attention = config.has_attention(index)
    norm_groups = _norm_groups(config, index)
    attention, delta, layer_input = None, None, None
    if has_attention:
        attention = load_attention(config, place, index, rotary, window, cache, norm_groups)
    else:
        assert config.delta is not None
        own_index = config.delta.layers.index(index)
        delta = DeltaNet(config.delta, config.norm_eps, place, prefix, own_index, norm_groups.get(DELTA_NORM))
    if config.layer_input_size:
        gate, projection = config.input_groups
        layer_input = LayerInput(
            gate=linear(gate, False),
            gate_group=_group(modules, gate),
            projection=linear(projection, False),
            projection_group=_group(modules, projection),
            norm=place.norm(f"{prefix}.{INPUT_NORM}", hidden_size),
        )
    scalar = 1.0
    if config.has_layer_scalars:
        scalar = place.finite(f"{prefix}.{LAYER_SCALAR}", (1,)).item()
    return DecoderLayer(
        norm_groups=norm_groups,
        attention_norm=norm(config.norms.before_attention) or NoNorm(),
        qkv=linear(qkv, config.attention.qkv_bias and has_attention),
        qkv_group=_group(modules, qkv),
        attention=attention,
        delta=delta,
        o=linear(o, config.attention.o_bias and has_attention),
        o_group=_group(modules, o),
        attention_output_norm=norm(config.norms.after_attention),
        feed_forward_norm=norm(config.norms.before_feed_forward) or NoNorm(),
        feed_forward=block,
        mixture=mixture,
        feed_forward_output_norm=norm(config.norms.after_feed_forward),
        layer_input=layer_input,
        scalar=scalar,
        altup=None if config.altup is None else AltUpLayer(config.altup, hidden_size, place, prefix),
    )
