"""Dimensions of the models that the GPU benchmark measures or counts, and of tiny models for checks and tests."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.bench import Bench
from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.kernels.tables import AttentionSpec, ModuleGroup


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts that replaces the feed-forward network of each layer."""

    num_experts: int
    top_k: int
    size: int

    @property
    def fields(self) -> dict[str, object]:
        """The fields of a Qwen3-MoE model's `config.json` that describe the experts."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.size,
            "norm_topk_prob": True,
        }


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The gated delta rule that replaces attention in all layers except every `interval`-th."""

    num_k_heads: int
    num_v_heads: int
    dim: int
    interval: int

    @property
    def fields(self) -> dict[str, object]:
        """The fields of a Qwen3.5 model's `config.json` that describe these layers."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "linear_num_key_heads": self.num_k_heads,
            "linear_num_value_heads": self.num_v_heads,
            "linear_key_head_dim": self.dim,
            "linear_value_head_dim": self.dim,
            "full_attention_interval": self.interval,
        }


@dataclass(frozen=True, slots=True)
class Model:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    experts: Experts | None = None
    hybrid: Hybrid | None = None

    @property
    def modules(self) -> tuple[LinearShape, ...]:
        hidden, wide, kv = self.hidden_size, self.intermediate_size, self.num_kv_heads * self.head_dim
        sizes = {
            "q": (hidden, hidden), "k": (hidden, kv), "v": (hidden, kv), "o": (hidden, hidden),
            "gate": (hidden, wide), "up": (hidden, wide), "down": (wide, hidden),
        }  # fmt: skip
        return tuple(LinearShape(name, *size) for name, size in sizes.items())

    @property
    def groups(self) -> tuple[ModuleGroup, ...]:
        """q/k/v, o, gate/up and down. The modules of a group share an input, a shrink and an expand."""
        return tuple(self._group(indices) for indices in ((0, 1, 2), (3,), (4, 5), (6,)))

    def _group(self, indices: tuple[int, ...]) -> ModuleGroup:
        widths = tuple(self.modules[i].out_features for i in indices)
        offsets = tuple(sum(widths[:i]) for i in range(len(widths)))
        return ModuleGroup(indices, self.modules[indices[0]].in_features, widths, offsets)

    @property
    def attention(self) -> AttentionSpec:
        return AttentionSpec(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)

    @property
    def linear_elements(self) -> int:
        return sum(module.in_features * module.out_features for module in self.modules)

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of weights that a decode step reads: all linear layers and the head."""
        return (self.num_layers * self.linear_elements + self.vocab_size * self.hidden_size) * itemsize

    def all_bytes(self, itemsize: int) -> int:
        """Bytes of all weights, including the embedding."""
        return self.weight_bytes(itemsize) + self.vocab_size * self.hidden_size * itemsize

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of one token's K and V in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize

    def adapter_bytes(self, rank: int, itemsize: int) -> int:
        """Bytes of one adapter's A and B on all seven linear layers."""
        elements = sum(module.in_features + module.out_features for module in self.modules)
        return self.num_layers * rank * elements * itemsize

    def geometry(self, itemsize: int, num_layers: int | None = None) -> PageGeometry:
        """The page geometry for all layers, or for the first `num_layers`."""
        return PageGeometry(num_layers or self.num_layers, self.num_kv_heads, self.head_dim, itemsize, itemsize)


LLAMA_8B = Model(32, 4096, 14336, 32, 8, 128, 128256)

LLAMA_70B = Model(80, 8192, 28672, 64, 8, 128, 128256)

LLAMA_7B = Model(32, 4096, 11008, 32, 32, 128, 32000)
"""Llama-7B, the base of S-LoRA's settings S1 and S2."""

QWEN3_30B_A3B = Model(48, 2048, 6144, 32, 4, 128, 151936, Experts(128, 8, 768))

QWEN3_5_9B = Model(32, 4096, 12288, 16, 4, 256, 248320, hybrid=Hybrid(16, 32, 128, 4))
"""A hybrid decoder with the dimensions of Qwen3.5-9B."""

TINY_HYBRID = Model(4, 64, 96, 4, 2, 16, 96, hybrid=Hybrid(1, 2, 16, 2))

TINY_EXPERTS = Model(2, 64, 96, 4, 2, 16, 96, Experts(8, 2, 48))

TINY = Model(2, 64, 96, 4, 2, 16, 96)
"""A model that Triton's interpreter runs in seconds, with pages of 1,024 elements per layer."""


def model_of(bench: Bench) -> Model:
    return TINY if bench.is_tiny else LLAMA_8B
