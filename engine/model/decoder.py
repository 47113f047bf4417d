"""The decoder: one transformer for all architectures, with all of a batch's adapters applied in one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from loramux.engine.batch import StepInputs
from loramux.engine.cache_groups import CacheLayout, cache_layout, hybrid_layout, narrow_windows
from loramux.engine.device.backend import Backend, Linear
from loramux.engine.layer_groups import NO_GROUPS, LayerGroups
from loramux.engine.model.delta_net import DeltaNet
from loramux.engine.model.layer_adapters import LayerAdapters
from loramux.engine.model.mixture import Mixture, mixture_groups
from loramux.engine.model.model_config import EMBEDDING, GELU_TANH, HEAD, SINKS, ModelConfig
from loramux.engine.model.norms import NoNorm, Norm
from loramux.engine.model.placement import Placement
from loramux.engine.model.rope_config import NO_ROPE
from loramux.engine.model.rotary import in_halves, query_scales, rotary_tables
from loramux.engine.model.vocabularies import Vocabularies
from loramux.engine.model.weights import WeightSource
from loramux.kernels.dispatch import Kernels, KernelShapes
from loramux.kernels.layout import LinearShape
from loramux.kernels.tables import AdapterTables, AttentionSpec, LoraCall, ModuleGroup, Segments


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer. q/k/v are fused into one linear.

    A layer with a `mixture` has a `feed_forward` only if it has a shared expert. A layer with a `delta` has no
    `attention`; `qkv` and `o` are then the input and output projections of the delta rule.

    Output norms apply to the outputs of attention and feed-forward before these are added to the residual. `qk_norms`
    are the norms of q and k, or empty. `rotary` is the index of the decoder's rotary tables for this layer's q and k.
    With `interleaves`, neighbouring channels are rotated together. `cache_group` and `cache_layer` are the layer's
    `CacheLayout.place`.
    """

    attention_norm: Norm
    qkv: Linear
    qkv_group: ModuleGroup
    qk_norms: tuple[Norm, ...]
    rotary: int
    interleaves: bool
    attention: AttentionSpec | None
    delta: DeltaNet | None
    cache_group: int
    cache_layer: int
    sinks: torch.Tensor | None
    o: Linear
    o_group: ModuleGroup
    attention_output_norm: Norm | None
    feed_forward_norm: Norm
    feed_forward: FeedForward | None
    mixture: Mixture | None
    feed_forward_output_norm: Norm | None


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """A feed-forward block that all tokens use, with gate/up fused: a dense layer's block, or the shared expert."""

    gate_up: Linear
    gate_up_group: ModuleGroup
    down: Linear
    down_group: ModuleGroup


@dataclass(frozen=True, slots=True, eq=False)
class HeadAdapters:
    """Inputs for the head's adapters: `segments` cover the rows of `hidden` whose adapters modify the head.

    None of these adapters replaces more than `max_rows` rows of the head. `vocabularies` is None if all of them have
    the base's tokens.
    """

    kernels: Kernels
    tables: AdapterTables
    segments: Segments
    max_rows: int = 0
    vocabularies: Vocabularies | None = None


class Decoder:
    """A decoder-only model on one device. Its output depends only on its inputs, the pool and the tables.

    Activations are float32 on a CPU and have the weights' dtype on a GPU. `hidden` can be captured as a graph.
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
        ropes = list(dict.fromkeys(config.layer_ropes))
        # Kernels need no mask for a window that covers every context.
        windows = narrow_windows(config.layer_windows, max_len)
        self.cache_layout = cache_layout(windows, max_len)
        if config.delta is not None:
            num_state_pages = config.num_state_pages(config.geometry(dtype.itemsize, dtype.itemsize))
            self.cache_layout = hybrid_layout(config.num_layers, config.delta.attention_layers, num_state_pages)
        self._layers = [
            _load_layer(config, place, layer, ropes.index(config.layer_ropes[layer]), windows[layer], self.cache_layout)
            for layer in range(config.num_layers)
        ]
        self._final_norm = place.norm("model.norm", config.hidden_size)
        if config.tied_embeddings:
            self._head = backend.make_linear(self._embedding, None)
        else:
            self._head = place.linear("", [config.outer_modules[HEAD]], has_bias=False)
        self._rotary = [
            (cos.to(backend.device), sin.to(backend.device))
            for cos, sin in (rotary_tables(rope, config.head_dim, max_len) for rope in ropes)
        ]
        scales = query_scales(ropes[0], max_len)
        self._query_scales = None if scales is None else scales.to(backend.device, self._dtype)

    @property
    def module_groups(self) -> tuple[npt.NDArray[np.intp], ...]:
        """The indices of each group of `LayerGroups` on the axis of modules. Empty groups are in no layer."""
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
        return KernelShapes(
            groups=tuple(dict.fromkeys(groups)),
            attention=tuple(layer.attention for layer in self._layers if layer.attention is not None),
            outer_groups=(self._embedding_group, self._head_group),
            delta=None if self.config.delta is None else self.config.delta.spec,
        )

    @property
    def outer_factors(self) -> tuple[float, ...]:
        """Factors applied to the outputs of `config.outer_modules`, for the base and for adapters."""
        return (self._embedding_scale, 1.0)

    def with_few_layers(self) -> Decoder:
        """A copy that shares the weights but has only one layer of each kind. It launches every kernel in less time."""
        few = copy.copy(self)
        kinds = {(layer.attention, layer.feed_forward is None, layer.mixture is None): layer for layer in self._layers}
        few._layers = list(kinds.values())
        return few

    @torch.inference_mode()
    def embed(self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables) -> torch.Tensor:
        """Embeddings of a step's tokens, including adapters, `[num_tokens, hidden_size]`."""
        tokens, segments = inputs.tokens, inputs.embedding_segments
        is_adapted = segments is not None and segments.num_segments > 0
        if is_adapted:
            # An adapter's rows replace what is read here for tokens beyond the base's vocabulary.
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
        """Run one step and return the last layer's normed output at the sample rows, `[num_samples, hidden_size]`."""
        config, residual_scale = self.config, self.config.residual_scale
        num_tokens = inputs.tokens.shape[0]
        angles = [(cos[inputs.positions], sin[inputs.positions]) for cos, sin in self._rotary]
        query_scale = None if self._query_scales is None else self._query_scales[inputs.positions]
        activate = _activation(config, kernels)
        q_out, kv_out = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        residual = self.embed(inputs, kernels, tables)
        # Attention skips padding rows, which belong to no sequence. Zeros keep the rows' values finite.
        attended = residual.new_zeros(num_tokens, config.num_heads, config.head_dim)

        # The groups that adapters of this step modify.
        adapted = inputs.groups if inputs.segments.num_segments else NO_GROUPS

        def attend(qkv: torch.Tensor, layer: DecoderLayer) -> torch.Tensor:
            """Attention of one layer, from its projections to the input of o."""
            assert layer.attention is not None
            q, k, v = qkv.split((2 * q_out if config.gates_attention else q_out, kv_out, kv_out), dim=1)
            gate = None
            if config.gates_attention:
                q, gate = q.view(num_tokens, config.num_heads, 2 * config.head_dim).chunk(2, dim=2)
            if layer.qk_norms:
                q, k = (
                    norm(kernels, one.view(num_tokens, -1, size))
                    for norm, one, (_, size) in zip(layer.qk_norms, (q, k), config.qk_norm_sizes, strict=True)
                )
            q = q.view(num_tokens, config.num_heads, config.head_dim)
            k = k.view(num_tokens, config.num_kv_heads, config.head_dim)
            v = v.view(num_tokens, config.num_kv_heads, config.head_dim)
            if query_scale is not None:
                q = q * query_scale
            if layer.interleaves:
                num_pairs = angles[layer.rotary][0].shape[1]
                q, k = in_halves(q, num_pairs), in_halves(k, num_pairs)
            batch = inputs.attention[layer.cache_group]
            kernels.rotate_and_store(q, k, v, *angles[layer.rotary], layer.cache_layer, batch)
            kernels.paged_attention(q, layer.cache_layer, batch, layer.attention, attended, layer.sinks)
            if gate is None:
                return attended.view(num_tokens, q_out)
            return (attended * gate.sigmoid()).view(num_tokens, q_out)

        def feed_forward(x: torch.Tensor, layer: DecoderLayer, adapters: LayerAdapters) -> torch.Tensor:
            block, out = layer.feed_forward, None
            if block is not None:
                inner = adapters.add(x, block.gate_up(x), LayerGroups.GATE_UP, block.gate_up_group)
                inner = activate(inner)
                out = adapters.add(inner, block.down(inner), LayerGroups.DOWN, block.down_group)
            if layer.mixture is not None:
                out = layer.mixture(x, out, kernels, activate, adapters)
            assert out is not None, "each layer has a feed-forward or experts"
            return out

        x = residual
        for index, layer in enumerate(self._layers):
            adapters = LayerAdapters(kernels, tables, inputs.slots, inputs.segments, adapted, index)
            norm = layer.attention_norm
            x = norm(kernels, residual) if index == 0 else norm.add(kernels, x, residual)
            qkv = adapters.add(x, layer.qkv(x), LayerGroups.QKV, layer.qkv_group)
            normed = x
            if layer.delta is None:
                x = attend(qkv, layer)
            else:
                assert inputs.states is not None
                x = layer.delta(qkv, kernels, inputs.states)
            x = adapters.add(x, layer.o(x), LayerGroups.O, layer.o_group)
            if layer.attention_output_norm is not None:
                x = layer.attention_output_norm(kernels, x)
            if residual_scale != 1.0:
                x.mul_(residual_scale)
            attention_output = x
            x = normed if config.parallel_blocks else layer.feed_forward_norm.add(kernels, x, residual)
            x = feed_forward(x, layer, adapters)
            if layer.feed_forward_output_norm is not None:
                x = layer.feed_forward_output_norm(kernels, x)
            if residual_scale != 1.0:
                x.mul_(residual_scale)
            if config.parallel_blocks:
                x.add_(attention_output)
        rows = inputs.sample_rows
        return self._final_norm.add(kernels, x[rows], residual[rows])

    def new_hidden(self, num_rows: int) -> torch.Tensor:
        """Allocate memory for `num_rows` rows of the output of `hidden`."""
        return torch.empty(num_rows, self.config.hidden_size, dtype=self._dtype, device=self._embedding.device)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, adapters: HeadAdapters | None = None) -> torch.Tensor:
        """Logits of rows of `hidden`, `[num_rows, num_columns]`, in the dtype of the activations.

        `adapters` is None if no row's adapter modifies the head. There is a column for each token of the base and, if
        an adapter has further tokens, MAX_EXTRA_TOKENS more. Tokens that a row's adapter does not have get FORBIDDEN.
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


def _outer(tables: AdapterTables) -> AdapterTables:
    assert tables.outer is not None, "segments of outer modules come with their tables"
    return tables.outer


def all_module_groups(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """The indices of each group of `LayerGroups`: first `ModelConfig.module_groups`, then the groups of the experts."""
    gate_up: list[int] = []
    down: list[int] = []
    if config.experts is not None:
        first, num_linears = len(config.modules), len(config.experts.linears)
        for expert in range(config.experts.num_experts):
            of_expert = [first + config.experts.index(expert, linear) for linear in range(num_linears)]
            gate_up += of_expert[:-1]
            down.append(of_expert[-1])
    return (*config.module_groups, tuple(gate_up), tuple(down))


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
    hidden_size, head_dim = config.hidden_size, config.head_dim
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
        )
    mixture = None
    if config.mixture is not None and index in config.mixture.layers:
        groups = mixture_groups(config.mixture, hidden_size, _group(modules, router), first_expert=len(modules))
        mixture = Mixture(config.mixture, groups, hidden_size, place, prefix)
    has_attention = config.has_attention(index)
    attention, delta, cache_group, cache_layer = None, None, 0, 0
    qk_norms: tuple[Norm, ...] = ()
    if has_attention:
        attention = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=head_dim,
            scale=config.attention_scale,
            sliding_window=window,
            soft_cap=config.attention_soft_cap,
        )
        qk_norms = tuple(place.norm(f"{prefix}.self_attn.{name}", size) for name, size in config.qk_norm_sizes)
        cache_group, cache_layer = cache.place(index)
    else:
        assert config.delta is not None
        delta = DeltaNet(config.delta, config.norm_eps, place, prefix, config.delta.layers.index(index))
    return DecoderLayer(
        attention_norm=norm(config.norms.before_attention) or NoNorm(),
        qkv=linear(qkv, config.qkv_bias and has_attention),
        qkv_group=_group(modules, qkv),
        qk_norms=qk_norms,
        rotary=rotary,
        interleaves=config.interleaved_rotary and config.layer_ropes[index] is not NO_ROPE,
        attention=attention,
        delta=delta,
        cache_group=cache_group,
        cache_layer=cache_layer,
        sinks=place.finite(f"{prefix}.self_attn.{SINKS}", (config.num_heads,)) if config.has_sinks else None,
        o=linear(o, config.o_bias and has_attention),
        o_group=_group(modules, o),
        attention_output_norm=norm(config.norms.after_attention),
        feed_forward_norm=norm(config.norms.before_feed_forward) or NoNorm(),
        feed_forward=block,
        mixture=mixture,
        feed_forward_output_norm=norm(config.norms.after_feed_forward),
    )
