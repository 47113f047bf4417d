"""The decoder: a Llama-shaped transformer over the page pool, with every adapter of a batch applied in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from loramux.engine.batch import Batch
from loramux.engine.model_config import ModelConfig
from loramux.engine.rotary import rotary_tables
from loramux.engine.weights import Weights, open_weights
from loramux.kernels.cpu_linear import PackedLinear
from loramux.kernels.dispatch import Kernels
from loramux.kernels.layout import MAX_RANK
from loramux.kernels.tables import AdapterTables, AttentionSpec, ModuleGroup, Segments


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer; q/k/v are one linear and gate/up are one linear."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PackedLinear
    post_attention_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    attention: AttentionSpec


@dataclass(frozen=True, slots=True)
class LoraGroups:
    """The four groups of modules that share an input: one shrink and one expand each."""

    qkv: ModuleGroup
    o: ModuleGroup
    gate_up: ModuleGroup
    down: ModuleGroup


class Decoder:
    """A decoder-only model, float32 activations on CPU. `forward` is a pure function of its batch, pool and tables."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, max_len: int) -> None:
        self.config = config
        self._groups = lora_groups(config)
        self._embedding = weights.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)).to(dtype)
        self._layers = [_load_layer(config, weights, layer, dtype) for layer in range(config.num_layers)]
        self._final_norm = weights.tensor("model.norm.weight", (config.hidden_size,)).float()
        head = self._embedding
        if not config.tied_embeddings:
            head = weights.tensor("lm_head.weight", (config.vocab_size, config.hidden_size)).to(dtype)
        self._head = PackedLinear(head)
        self._cos, self._sin = rotary_tables(config.rope, config.head_dim, max_len)

    @staticmethod
    def load(model_dir: Path, config: ModelConfig, dtype: torch.dtype, max_len: int) -> Decoder:
        with open_weights(model_dir) as weights:
            return Decoder(config, weights, dtype, max_len)

    @torch.inference_mode()
    def forward(self, batch: Batch, kernels: Kernels, tables: AdapterTables) -> torch.Tensor:
        """Run one step and return the logits of its sample rows, float32 `[num_samples, vocab_size]`."""
        config = self.config
        num_tokens = batch.tokens.shape[0]
        segments = kernels.build_segments(batch.slots)
        planes = torch.empty(num_tokens, 3, MAX_RANK)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        q_out, kv_out = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attended = torch.empty(num_tokens, config.num_heads, config.head_dim)
        hidden = self._embedding[batch.tokens].float()  # [num_tokens, hidden_size]

        def with_adapters(x: torch.Tensor, y: torch.Tensor, index: int, group: ModuleGroup) -> torch.Tensor:
            """Add the adapters' part to `y`, the base's output for `x`."""
            if segments.num_segments:
                _apply_lora(kernels, tables, segments, planes, x, y, index, group)
            return y

        for index, layer in enumerate(self._layers):
            x = kernels.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
            qkv = with_adapters(x, layer.qkv(x), index, self._groups.qkv)
            q, k, v = qkv.split((q_out, kv_out, kv_out), dim=1)
            q = q.view(num_tokens, config.num_heads, config.head_dim)
            k = k.view(num_tokens, config.num_kv_heads, config.head_dim)
            v = v.view(num_tokens, config.num_kv_heads, config.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = kernels.rms_norm(q, layer.q_norm, config.rms_norm_eps)
                k = kernels.rms_norm(k, layer.k_norm, config.rms_norm_eps)
            kernels.rotary(q, k, cos, sin)
            kernels.kv_write(k, v, index, batch.attention)
            kernels.paged_attention(q, index, batch.attention, layer.attention, attended)
            x = attended.view(num_tokens, q_out)
            hidden += with_adapters(x, layer.o(x), index, self._groups.o)
            x = kernels.rms_norm(hidden, layer.post_attention_norm, config.rms_norm_eps)
            x = kernels.silu_and_mul(with_adapters(x, layer.gate_up(x), index, self._groups.gate_up))
            hidden += with_adapters(x, layer.down(x), index, self._groups.down)
        sampled = kernels.rms_norm(hidden[batch.sample_rows], self._final_norm, config.rms_norm_eps)
        return self._head(sampled)


def _apply_lora(
    kernels: Kernels,
    tables: AdapterTables,
    segments: Segments,
    planes: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    layer: int,
    group: ModuleGroup,
) -> None:
    planes = planes[:, : len(group.modules)]
    kernels.lora_shrink(x, layer, group, tables, segments, planes)
    kernels.lora_expand(planes, layer, group, tables, segments, y)


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


def _load_layer(config: ModelConfig, weights: Weights, index: int, dtype: torch.dtype) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    hidden = (config.hidden_size,)

    def linear(modules: tuple[int, ...], has_bias: bool) -> PackedLinear:
        shapes = [config.modules[m] for m in modules]
        parts = [
            weights.tensor(f"{prefix}.{shape.name}.weight", (shape.out_features, shape.in_features)) for shape in shapes
        ]
        biases = [weights.tensor(f"{prefix}.{shape.name}.bias", (shape.out_features,)) for shape in shapes if has_bias]
        return PackedLinear(torch.cat(parts).to(dtype), torch.cat(biases).to(dtype) if has_bias else None)

    def norm(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return weights.tensor(f"{prefix}.{name}.weight", shape).float()

    head = (config.head_dim,)
    return DecoderLayer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear((0, 1, 2), config.qkv_bias),
        q_norm=norm("self_attn.q_norm", head) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head) if config.qk_norm else None,
        o=linear((3,), config.o_bias),
        post_attention_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear((4, 5), config.mlp_bias),
        down=linear((6,), config.mlp_bias),
        attention=AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            sliding_window=config.layer_windows[index],
        ),
    )
