"""Random tiny base models and PEFT adapters, made by transformers and peft, and an adapter source over memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from loramux.adapter_store.canonical import write_canonical
from loramux.adapter_store.packing import PackedAdapter, pack
from loramux.adapter_store.target import PackTarget
from loramux.adapter_store.validation import validate_files

VOCAB_SIZE = 320
NUM_LAYERS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 208,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.25,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEARS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def make_base(family: str, directory: Path) -> PreTrainedModel:
    """Make a random base model of a family, save it to `directory` and return it, float32."""
    torch.manual_seed(sum(family.encode()))
    match family:
        case "llama":
            model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
        case "llama-small":
            # For kernels that are interpreted: few layers and heads, which is what their time goes by.
            small = {**SHAPE, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
            model = LlamaForCausalLM(LlamaConfig(**small, tie_word_embeddings=True))
        case "llama-tied-bias-llama3-rope":
            config = LlamaConfig(
                **SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE
            )
            model = LlamaForCausalLM(config)
        case "mistral-window":
            model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=96, attn_implementation="eager"))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16))
        case _:
            raise ValueError(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases and norms begin as constants, which would hide a mix-up.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.3))
    model = model.float().eval()
    model.save_pretrained(directory)
    return model


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """One adapter to make: its rank, the modules it targets, and ranks that differ by layer."""

    name: str
    rank: int
    modules: list[str]
    alpha: float = 16.0
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    use_rslora: bool = False
    layers: list[int] | None = None


PLANS = [
    AdapterPlan("r1", 1, ["q_proj"], alpha=2.0),
    AdapterPlan("r3", 3, ["v_proj", "down_proj"], alpha=6.0),
    AdapterPlan("r4", 4, ["gate_proj", "up_proj"], alpha=8.0),
    AdapterPlan("r8", 8, ATTENTION),
    AdapterPlan("r16", 16, ALL_LINEARS, use_rslora=True, alpha=4.0),
    AdapterPlan("r31", 31, ["k_proj", "o_proj", "up_proj"], layers=[0, 2]),
    AdapterPlan("r64", 64, ALL_LINEARS, alpha=32.0),
    AdapterPlan(
        "by-layer",
        8,
        ALL_LINEARS,
        rank_pattern={
            f"layers.{layer}.{module}": rank
            for layer, rank in enumerate((2, 5, 16))
            for module in ("self_attn.q_proj", "mlp.down_proj")
        },
    ),
]


def add_adapters(base: PreTrainedModel, plans: list[AdapterPlan], directory: Path) -> Any:
    """Add the planned adapters to `base` with peft, save each below `directory`, and return the PEFT model."""
    torch.manual_seed(5)
    model: Any = None
    for plan in plans:
        config = LoraConfig(
            r=plan.rank,
            lora_alpha=plan.alpha,
            target_modules=plan.modules,
            rank_pattern=plan.rank_pattern,
            use_rslora=plan.use_rslora,
            layers_to_transform=plan.layers,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        if model is None:
            model = get_peft_model(base, config, adapter_name=plan.name)
        else:
            model.add_adapter(plan.name, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.08)
    model.save_pretrained(directory)
    return model.eval()


def pack_peft_directory(directory: Path, target: PackTarget) -> PackedAdapter:
    """Take a PEFT directory the way an upload goes: validate, make canonical, pack."""
    tensors = directory / "adapter_model.safetensors"
    report = validate_files((directory / "adapter_config.json").read_bytes(), tensors, target)
    canonical = directory / "canonical.safetensors"
    write_canonical(tensors, report.scales, canonical)
    return pack(canonical, target)


@dataclass(frozen=True, slots=True)
class MemoryLease:
    packed: PackedAdapter

    def release(self) -> None:
        """Nothing to give back."""


class MemorySource:
    """Packed adapters by digest."""

    def __init__(self, packed: list[PackedAdapter]) -> None:
        self._packed = {one.digest: one for one in packed}

    def lease(self, digest: str) -> MemoryLease:
        return MemoryLease(self._packed[digest])
