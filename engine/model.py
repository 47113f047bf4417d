"""The decoder: a Llama-shaped transformer over the page pool, with every adapter of a batch applied in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from loramux.engine.backend import Backend, Linear
from loramux.engine.batch import StepInputs
from loramux.engine.model_config import ModelConfig
from loramux.engine.rotary import rotary_tables
from loramux.engine.weights import WeightSource
from loramux.kernels.dispatch import Kernels, KernelShapes
from loramux.kernels.layout import LinearShape
from loramux.kernels.tables import AdapterTables, AttentionSpec, ModuleGroup


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer; q/k/v are one linear and gate/up are one linear."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    attention: AttentionSpec


@dataclass(frozen=True, slots=True)
class LoraGroups:
    """The four groups of modules that share an input: one shrink and one expand each."""

    qkv: ModuleGroup
    o: ModuleGroup
    gate_up: ModuleGroup
    down: ModuleGroup


class Decoder:
    """A decoder-only model on one device; what it computes depends on its inputs, the pool and the tables alone.

    Activations are float32 on a CPU and of the weights' dtype on a GPU. `hidden` may be captured as a graph.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, max_len: int, backend: Backend
    ) -> None:
        self.config = config
        self._dtype = backend.activation_dtype or dtype
        self._groups = lora_groups(config)
        place = _Placement(weights, dtype, backend)
        self._embedding = place.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers = [_load_layer(config, place, layer) for layer in range(config.num_layers)]
        self._final_norm = place.norm("model.norm.weight", config.hidden_size)
        head = self._embedding
        if not config.tied_embeddings:
            head = place.tensor("lm_head.weight", (config.vocab_size, config.hidden_size))
        self._head = backend.make_linear(head, None)
        cos, sin = rotary_tables(config.rope, config.head_dim, max_len)
        self._cos, self._sin = cos.to(backend.device), sin.to(backend.device)

    @property
    def shapes(self) -> KernelShapes:
        """What the kernels must be able to compute."""
        groups = self._groups
        return KernelShapes(
            groups=(groups.qkv, groups.o, groups.gate_up, groups.down),
            attention=tuple(layer.attention for layer in self._layers),
        )

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables) -> torch.Tensor:
        """Run one step and return the last layer's output at its sample rows `[num_samples, hidden_size]`, normed."""
        config, eps = self.config, self.config.rms_norm_eps
        num_tokens = inputs.tokens.shape[0]
        cos, sin = self._cos[inputs.positions], self._sin[inputs.positions]
        q_out, kv_out = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        residual = functional.embedding(inputs.tokens, self._embedding).to(self._dtype)  # [num_tokens, hidden_size]
        # Rows that only pad a step belong to no sequence and are not attended: zeros keep them finite.
        attended = residual.new_zeros(num_tokens, config.num_heads, config.head_dim)

        def with_adapters(x: torch.Tensor, y: torch.Tensor, index: int, group: ModuleGroup) -> torch.Tensor:
            """Add the adapters' part to `y`, the base's output for `x`."""
            if inputs.segments.num_segments:
                planes = kernels.lora_planes(group, num_tokens, inputs.segments)
                kernels.lora_shrink(x, index, group, tables, inputs.segments, planes)
                kernels.lora_expand(planes, index, group, tables, inputs.segments, y)
            return y

        x = residual
        for index, layer in enumerate(self._layers):
            if index == 0:
                x = kernels.rms_norm(residual, layer.input_norm, eps)
            else:
                x = kernels.add_rms_norm(x, residual, layer.input_norm, eps)
            qkv = with_adapters(x, layer.qkv(x), index, self._groups.qkv)
            q, k, v = qkv.split((q_out, kv_out, kv_out), dim=1)
            q = q.view(num_tokens, config.num_heads, config.head_dim)
            k = k.view(num_tokens, config.num_kv_heads, config.head_dim)
            v = v.view(num_tokens, config.num_kv_heads, config.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = kernels.rms_norm(q, layer.q_norm, eps)
                k = kernels.rms_norm(k, layer.k_norm, eps)
            kernels.rotary(q, k, cos, sin)
            kernels.kv_write(k, v, index, inputs.attention)
            kernels.paged_attention(q, index, inputs.attention, layer.attention, attended)
            x = attended.view(num_tokens, q_out)
            x = with_adapters(x, layer.o(x), index, self._groups.o)
            x = kernels.add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = kernels.silu_and_mul(with_adapters(x, layer.gate_up(x), index, self._groups.gate_up))
            x = with_adapters(x, layer.down(x), index, self._groups.down)
        rows = inputs.sample_rows
        return kernels.add_rms_norm(x[rows], residual[rows], self._final_norm, eps)

    def new_hidden(self, num_rows: int) -> torch.Tensor:
        """Memory for `num_rows` rows of what `hidden` returns."""
        return torch.empty(num_rows, self.config.hidden_size, dtype=self._dtype, device=self._cos.device)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of rows of `hidden`, `[num_rows, vocab_size]` of the activations' dtype."""
        return self._head(hidden)


def lora_groups(config: ModelConfig) -> LoraGroups:
    """Group the modules of `config.modules` by their input."""
    return LoraGroups(
        qkv=_group(config, (0, 1, 2)), o=_group(config, (3,)), gate_up=_group(config, (4, 5)), down=_group(config, (6,))
    )


def _group(config: ModelConfig, modules: tuple[int, ...]) -> ModuleGroup:
    shapes = [config.modules[m] for m in modules]
    out_features = tuple(shape.out_features for shape in shapes)
    return ModuleGroup(
        modules=modules,
        in_features=shapes[0].in_features,
        out_features=out_features,
        out_offsets=tuple(sum(out_features[:i]) for i in range(len(modules))),
    )


@dataclass(frozen=True, slots=True)
class _Placement:
    """Brings tensors to where and what they are kept as: linears in the weights' dtype, norms in float32."""

    weights: WeightSource
    dtype: torch.dtype
    backend: Backend

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.weights.tensor(name, shape).to(self.backend.device, self.dtype)

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self.weights.tensor(name, (size,)).to(self.backend.device, torch.float32)

    def linear(self, prefix: str, shapes: list[LinearShape], has_bias: bool) -> Linear:
        """Linears that share an input as one, whose output is theirs side by side."""
        parts = [self.tensor(f"{prefix}.{one.name}.weight", (one.out_features, one.in_features)) for one in shapes]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        bias = None
        if has_bias:
            bias = torch.cat([self.tensor(f"{prefix}.{one.name}.bias", (one.out_features,)) for one in shapes])
        return self.backend.make_linear(weight, bias)


def _load_layer(config: ModelConfig, place: _Placement, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    q, k, v, o, gate, up, down = config.modules
    return DecoderLayer(
        input_norm=place.norm(f"{prefix}.input_layernorm.weight", config.hidden_size),
        qkv=place.linear(prefix, [q, k, v], config.qkv_bias),
        q_norm=place.norm(f"{prefix}.self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=place.norm(f"{prefix}.self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        o=place.linear(prefix, [o], config.o_bias),
        post_attention_norm=place.norm(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
        gate_up=place.linear(prefix, [gate, up], config.mlp_bias),
        down=place.linear(prefix, [down], config.mlp_bias),
        attention=AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            sliding_window=config.layer_windows[index],
        ),
    )
