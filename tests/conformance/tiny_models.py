from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import transformers_weight_conversion
from torch.nn import Embedding, Linear
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.validation.validation import validate_files
from tests.conformance.further_families import FURTHER_FAMILIES, MakeModel
from tests.conformance.gemma4_families import GEMMA4_FAMILIES
from tests.conformance.hybrid_families import HYBRID_FAMILIES
from tests.conformance.mixture_families import FREQUENT_MIXTURES, MIXTURE_FAMILIES
from tests.conformance.singular_families import SINGULAR_FAMILIES
from tests.conformance.wrapped_families import WRAPPED_FAMILIES

V = TypeVar("V")

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
SMALL_SHAPE = {**SHAPE, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
"""A shape with few layers and heads, because the run time of interpreted kernels grows with both."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]
ALL_LINEARS = [*ATTENTION, *FEED_FORWARD]


WINDOW = 96
SMALL_WINDOW = 12
"""Sliding window, in tokens, of the models that get short prompts."""

PHI3_ORIGINAL_LEN = 256


def _llama(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))


def _llama2(shape: dict[str, Any], _: int) -> PreTrainedModel:
    config = LlamaConfig(**{**shape, "num_key_value_heads": shape["num_attention_heads"]}, tie_word_embeddings=False)
    return LlamaForCausalLM(config)


def _llama3(shape: dict[str, Any], _: int) -> PreTrainedModel:
    config = LlamaConfig(
        **shape, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=dict(LLAMA3_ROPE)
    )
    return LlamaForCausalLM(config)


def _mistral(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**shape, sliding_window=window, attn_implementation="eager"))  # type: ignore[call-arg]


def _qwen2(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))


def _qwen3(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16))


def _gemma(shape: dict[str, Any], window: int, num_layers: int) -> dict[str, Any]:
    """Settings of Gemma: an attention scale not derived from head_dim, and a window shorter than the longer prompts."""
    gemma = {"num_hidden_layers": num_layers, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": window}
    return {**shape, **gemma, "initializer_range": 0.15, "attn_implementation": "eager"}


def _gemma2(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """A Gemma 2 with soft caps low enough to affect most scores and logits, and layers with and without a window."""
    sizes = _gemma(shape, window, shape["num_hidden_layers"] + 1)
    return Gemma2ForCausalLM(Gemma2Config(**sizes, attn_logit_softcapping=4.0, final_logit_softcapping=8.0))


def _gemma3(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """A Gemma 3 with five windowed layers per full one (three in the small shape), plus one more layer."""
    pattern = 2 * shape["num_hidden_layers"]
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    sizes = _gemma(shape, window, pattern + 1)
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window_pattern=pattern, rope_parameters=ropes))  # type: ignore[call-arg]


def _phi3(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**shape, pad_token_id=0, sliding_window=window, attn_implementation="eager"))  # type: ignore[call-arg]


def _phi3_longrope(shape: dict[str, Any], _: int) -> PreTrainedModel:
    num_pairs = int(shape["hidden_size"] // shape["num_attention_heads"] * 0.75) // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1 + 0.15 * pair for pair in range(num_pairs)],
        "long_factor": [1 + 0.9 * pair for pair in range(num_pairs)],
    }
    config = Phi3Config(
        **shape, pad_token_id=0, original_max_position_embeddings=PHI3_ORIGINAL_LEN, rope_parameters=rope
    )
    return _with_one_longrope(Phi3ForCausalLM(config))


def _with_one_longrope(model: PreTrainedModel) -> PreTrainedModel:
    """Use the long-context frequencies for short contexts too, as an engine that serves long contexts does."""
    rotary = model.model.rotary_emb
    compute = ROPE_INIT_FUNCTIONS["longrope"]
    frequencies, _ = compute(model.config, torch.device("cpu"), seq_len=PHI3_ORIGINAL_LEN + 1)
    assert not torch.equal(frequencies, rotary.original_inv_freq)
    rotary.original_inv_freq.copy_(frequencies)
    return model


FAMILIES: dict[str, MakeModel] = {
    "llama": _llama,
    "llama2": _llama2,
    "llama-tied-bias-llama3-rope": _llama3,
    "mistral-window": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3-window": _phi3,
    "phi3-longrope": _phi3_longrope,
    **FURTHER_FAMILIES,
    **WRAPPED_FAMILIES,
    **MIXTURE_FAMILIES,
    **HYBRID_FAMILIES,
    **GEMMA4_FAMILIES,
    **SINGULAR_FAMILIES,
}
"""Creates a random model of a family from a shape and a window."""

_FURTHER = (
    FURTHER_FAMILIES | WRAPPED_FAMILIES | MIXTURE_FAMILIES | HYBRID_FAMILIES | GEMMA4_FAMILIES | SINGULAR_FAMILIES
)
RARE_FAMILIES = _FURTHER.keys() - set(FREQUENT_MIXTURES)
EVERY_FAMILY = [
    pytest.param(family, marks=pytest.mark.campaign if family in RARE_FAMILIES else ()) for family in FAMILIES
]
"""Test parameters with every family. `make campaign NAME=parity` adds the rare ones."""

_FUSED_QKV = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
_FUSED_GATE_UP = dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
_WITHOUT_GATE = {"gate_proj": "up_proj"}
_GRANITE_SHARED = {
    **dict.fromkeys(("gate_proj", "up_proj"), "shared_mlp.input_linear"),
    "down_proj": "shared_mlp.output_linear",
}
RENAMED_MODULES = {
    "phi3": {**_FUSED_QKV, **_FUSED_GATE_UP},
    **dict.fromkeys(("glm", "glm4", "glm4v", "glm46v"), _FUSED_GATE_UP),
    "starcoder2": {"gate_proj": "c_fc", "up_proj": "c_fc", "down_proj": "c_proj"},
    "phi": {"o_proj": "dense", "gate_proj": "fc1", "up_proj": "fc1", "down_proj": "fc2"},
    **dict.fromkeys(("apertus", "arcee", "nemotron", "jais2"), _WITHOUT_GATE),
    "granite4": _GRANITE_SHARED,
}
"""Names of linear layers that differ from those in Llama, by the family's name up to a hyphen."""

_DELTA_MODULES = {
    "q_proj": ["in_proj_qkv"],
    "k_proj": ["in_proj_a"],
    "v_proj": ["in_proj_z", "in_proj_b"],
    "o_proj": ["out_proj"],
}
_INPUT_MODULES = {
    "gate_proj": ["per_layer_input_gate"],
    "up_proj": ["per_layer_model_projection"],
    "down_proj": ["per_layer_projection"],
}
ADDED_MODULES = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _DELTA_MODULES),
    "gemma3n": _INPUT_MODULES,
    "gemma4": _INPUT_MODULES,
}
"""Linears that are targeted in addition to Llama's, by the family's name up to a hyphen."""


SHARED_BLOCKS = ("shared_expert", "shared_experts")


def make_base(
    family: str,
    directory: Path,
    shape: dict[str, Any] = SHAPE,
    window: int = WINDOW,
    make: MakeModel | None = None,
) -> PreTrainedModel:
    """Save a random model of the family, made by `make` if it is given."""
    torch.manual_seed(sum(family.encode()))
    model = (make or FAMILIES[family])(shape, window)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases and norms are initialized to constants, which would hide a mix-up.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.3))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("_bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.2)
    model = model.float().eval()
    model.save_pretrained(directory)
    return model


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The plan of one adapter: its rank, its target modules, and ranks and alphas that differ by layer or module.

    `invocation_tokens` make it an activated LoRA.
    """

    name: str
    rank: int
    modules: list[str]
    alpha: float = 16.0
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: dict[str, float] = dataclasses.field(default_factory=dict)
    use_rslora: bool = False
    layers: list[int] | None = None
    use_dora: bool = False
    lora_bias: bool = False
    invocation_tokens: tuple[int, ...] = ()

    def for_family(self, family: str) -> AdapterPlan:
        family = family.partition("-")[0]
        if (added := ADDED_MODULES.get(family)) is not None:
            others = [name for module in self.modules for name in added.get(module, ())]
            pattern = _in_hybrid_layers(self.rank_pattern) if family.startswith("qwen3_5") else self.rank_pattern
            return dataclasses.replace(self, modules=[*self.modules, *others], rank_pattern=pattern)
        renamed = RENAMED_MODULES.get(family)
        if renamed is None:
            return self
        return dataclasses.replace(
            self,
            modules=sorted({renamed.get(name, name) for name in self.modules}),
            rank_pattern=_renamed_pattern(self.rank_pattern, renamed),
            alpha_pattern=_renamed_pattern(self.alpha_pattern, renamed),
        )

    def for_experts(self, base: PreTrainedModel) -> AdapterPlan:
        """The same plan for a base with experts, without the modules that the base lacks; `o_proj` if none is left.

        A linear of a feed-forward is named with its block, because its name alone would also stand for the experts.
        """
        linears = [name for name, module in base.named_modules() if isinstance(module, (Linear, Embedding))]

        block = "feed_forward" if any(".feed_forward." in linear for linear in linears) else "mlp"

        def names(name: str) -> list[str]:
            above, dot, last = name.rpartition(".")
            above = above.replace("mlp", block)
            in_blocks = [f"{above or block}.{last}", *(f"{above}{dot}{shared}.{last}" for shared in SHARED_BLOCKS)]
            if last in _GRANITE_SHARED:
                in_blocks.append(f"{above.removesuffix('mlp')}{_GRANITE_SHARED[last]}")
            candidates = in_blocks if last in FEED_FORWARD else [name]
            return [one for one in candidates if any(f".{linear}".endswith(f".{one}") for linear in linears)]

        def pattern(values: dict[str, V]) -> dict[str, V]:
            return dict(sorted((name, value) for key, value in values.items() for name in names(key)))

        return dataclasses.replace(
            self,
            modules=sorted({name for module in self.modules for name in names(module)}) or ["o_proj"],
            rank_pattern=pattern(self.rank_pattern),
            alpha_pattern=pattern(self.alpha_pattern),
        )


def _in_hybrid_layers(pattern: dict[str, V]) -> dict[str, V]:
    """The same pattern for a base whose layers 0 and 2 have no attention."""
    named = {
        name.replace("self_attn.q_proj", "linear_attn.in_proj_qkv")
        if name.startswith(("layers.0.", "layers.2."))
        else name: value
        for name, value in pattern.items()
    }
    return dict(sorted(named.items()))


def _renamed_pattern(pattern: dict[str, V], renamed: dict[str, str]) -> dict[str, V]:
    found = {}
    for name, value in pattern.items():
        above, dot, last = name.rpartition(".")
        renamed_last = renamed.get(last, last)
        found[(above.removesuffix("mlp") if "." in renamed_last else above + dot) + renamed_last] = value
    return found


# Patterns are sorted by name, as peft saves them, because the first match counts.
PLANS = [
    AdapterPlan("r1", 1, ["q_proj"], alpha=2.0),
    AdapterPlan("r3", 3, ["v_proj", "down_proj"], alpha=6.0),
    AdapterPlan("r4", 4, ["gate_proj", "up_proj"], alpha=8.0, use_dora=True),
    AdapterPlan("r8", 8, ATTENTION, alpha_pattern={"layers.1.self_attn.q_proj": 3.0, "o_proj": 24.0}),
    AdapterPlan("r16", 16, ALL_LINEARS, use_rslora=True, alpha=4.0),
    AdapterPlan("r31", 31, ["k_proj", "o_proj", "up_proj"], layers=[0, 2], lora_bias=True),
    AdapterPlan("r64", 64, ALL_LINEARS, alpha=32.0, use_dora=True),
    AdapterPlan(
        "by-layer",
        8,
        ALL_LINEARS,
        rank_pattern={
            f"layers.{layer}.{module}": rank
            for layer, rank in enumerate((2, 5, 16))
            for module in ("mlp.down_proj", "self_attn.q_proj")
        },
        alpha_pattern={"layers.1.mlp.up_proj": 5.0, "self_attn.q_proj": 6.0},
        use_rslora=True,
    ),
]


OTHER_PARTS = ".*(vision|visual|projector|connector|aligner|image_tower|video_tower).*"
"""The parts of multimodal models whose linear layers have the names of the text decoder's."""


def has_other_parts(base: PreTrainedModel) -> bool:
    return hasattr(base.config, "vision_config")


def add_adapters(base: PreTrainedModel, plans: list[AdapterPlan], directory: Path) -> Any:
    """Add the planned adapters to `base` with peft, save each under `directory`, and return the PEFT model."""
    with warnings.catch_warnings():
        # peft warns about merging, which these tests never do, and that the biases of B have one dimension.
        for message in (
            "Model has `tie_word_embeddings=True`",
            "`lora_bias=True` was passed",
            "Adapter '.*LoRA tensor.s. have invalid shape",
        ):
            warnings.filterwarnings("ignore", message)
        # By default, peft applies the names of feed-forward linear layers only to the experts.
        with patch.object(transformers_weight_conversion, "_convert_peft_config_moe"):
            return _added_and_saved(base, plans, directory)


def _added_and_saved(base: PreTrainedModel, plans: list[AdapterPlan], directory: Path) -> Any:
    torch.manual_seed(5)
    model: Any = None
    for plan in plans:
        config = LoraConfig(
            r=plan.rank,
            lora_alpha=plan.alpha,
            target_modules=plan.modules,
            rank_pattern=plan.rank_pattern,
            alpha_pattern=plan.alpha_pattern,
            use_rslora=plan.use_rslora,
            layers_to_transform=plan.layers,
            use_dora=plan.use_dora,
            lora_bias=plan.lora_bias,
            # Other parts of a multimodal model have linear layers with the same names.
            exclude_modules=OTHER_PARTS if has_other_parts(base) else None,
            alora_invocation_tokens=list(plan.invocation_tokens) or None,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        if model is None:
            model = get_peft_model(base, config, adapter_name=plan.name)
        else:
            model.add_adapter(plan.name, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif "lora_" in name:
                parameter.normal_(0, 0.08)
    model.save_pretrained(directory, save_embedding_layers=False)
    return model.eval()


def pack_peft_directory(directory: Path, target: PackTarget, base_dir: Path) -> PackedAdapter:
    """Process a PEFT directory like an upload: validate it, write the canonical file, and pack the adapter."""
    tensors = directory / "adapter_model.safetensors"
    report = validate_files((directory / "adapter_config.json").read_bytes(), tensors, target)
    canonical = directory / "canonical.safetensors"
    write_canonical(
        tensors,
        report.scales,
        canonical,
        report.names,
        report.invocation_tokens,
        report.trained,
        report.vocab_size,
        report.num_labels,
        report.stack_forms,
    )
    return pack(canonical, target, BaseWeights(base_dir))
