"""The headers of a model directory give the same verdict as loading its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loramux.adapter_store.formats.packed.module_places import norm_places, shared_places
from loramux.engine.architectures.families import FAMILIES
from loramux.engine.architectures.mixture_families import MIXTURE_FAMILIES
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import stored_tensors
from loramux.engine.architectures.weight_shapes import check_shapes, weight_shapes
from loramux.engine.decoder.decoder import Decoder
from loramux.engine.decoder.weights import open_weights
from loramux.engine.device.backend import open_backend
from loramux.engine.loop.config import pack_target
from loramux.engine.protocol.errors import ModelNotSupported
from tests.quantized_layouts import LAYOUTS

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 31,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
EXPERT_SIZES = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 56, "shared_intermediate_size": 40}
EXPERT_FIELDS: dict[str, dict[str, Any]] = {
    "Qwen3_5MoeForCausalLM": {"full_attention_interval": 2},
    "Qwen2MoeForCausalLM": {"mlp_only_layers": [1]},
    "Qwen3MoeForCausalLM": {"mlp_only_layers": [1]},
    "Dots1ForCausalLM": {"num_experts_per_tok": 2, "n_shared_experts": 2},
    "Glm4MoeForCausalLM": {"use_qk_norm": True},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["full_attention"] * 2},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-tied-biased": {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    **{architecture: {"architectures": [architecture]} for architecture in FAMILIES},
    "Qwen3_5ForCausalLM": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "full_attention_interval": 2,
        "attention_bias": True,
    },
    **{
        architecture: {
            "architectures": [architecture],
            "num_experts": 8,
            **EXPERT_SIZES,
            **EXPERT_FIELDS.get(architecture, {}),
        }
        for architecture in MIXTURE_FAMILIES
    },
}


UNSERVED_NORMS = {
    "model.per_layer_projection_norm.weight",
    "model.layers.*.altup.router_norm.weight",
    "model.layers.*.laurel.post_laurel_norm.weight",
    "model.layers.*.post_per_layer_input_norm.weight",
    "model.layers.*.self_attn.key_layernorm.weight",
    "model.layers.*.self_attn.query_layernorm.weight",
}
"""Norms that adapters cannot replace."""


class RecordedWeights:
    """Returns zeros of every requested shape, and records the requests."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.asked[name] = shape
        return torch.zeros(shape)


def write_config(directory: Path, family: str, **changes: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({**SHAPE, **CONFIGS[family], **changes}))
    return ModelConfig.load(directory)


@pytest.mark.parametrize("family", CONFIGS)
def test_shapes_are_those_that_the_decoder_reads(tmp_path: Path, family: str) -> None:
    config = write_config(tmp_path, family)
    weights = RecordedWeights()
    Decoder(config, weights, torch.float32, 64, open_backend("cpu"))
    assert weight_shapes(config) == weights.asked


@pytest.mark.parametrize("family", CONFIGS)
def test_adapters_can_replace_the_biases_and_the_norms_that_the_decoder_reads(tmp_path: Path, family: str) -> None:
    config = write_config(tmp_path, family)
    target, shapes = pack_target(config, "float32"), weight_shapes(config)
    biased = {
        f"{place.key}.bias": (place.shape.out_features,) for place in shared_places(target) if place.shape.has_bias
    }
    for place in norm_places(target):
        assert shapes[f"{place.key}.weight"] == (place.norm.size,)
        biased |= {f"{place.key}.bias": (place.norm.size,)} if place.norm.has_bias else {}
    assert biased == {name: shape for name, shape in shapes.items() if name.endswith(".bias")}
    served = {f"{place.key}.weight" for place in norm_places(target)}
    others = {re.sub("[0-9]+", "*", name) for name in shapes.keys() - served if name.endswith("norm.weight")}
    assert others <= UNSERVED_NORMS
    assert len(target.all_modules) == config.first_norm + len(config.norm_shapes)


def loaded(directory: Path, config: ModelConfig) -> str:
    """The result of loading the weights."""
    try:
        with open_weights(directory) as weights:
            Decoder(config, weights, torch.float32, 64, open_backend("cpu"))
    except ModelNotSupported as error:
        return str(error)
    return "loaded"


def checked(directory: Path, config: ModelConfig) -> str:
    """The result of reading the headers."""
    try:
        check_shapes(config, stored_tensors(directory))
    except ModelNotSupported as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "loaded"),
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}, "loaded"),
        ({"model.norm.weight": None}, "no tensor model.norm.weight"),
        ({"model.layers.1.mlp.up_proj.weight": (40, 47)}, "has shape [40, 47], but config.json says [40, 48]"),
        ({"lm_head.weight": (30, 48)}, "has shape [30, 48]"),
        ({"model.layers.0.mlp.up_proj.bias": (40,)}, "does not use, such as model.layers.0.mlp.up_proj.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_headers_say_what_loading_says(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    config = write_config(tmp_path, "llama")
    shapes = {**weight_shapes(config), **change}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items() if shape is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    assert says in checked(tmp_path, config)
    assert checked(tmp_path, config) == loaded(tmp_path, config)


@pytest.mark.parametrize(("value", "says"), [(0.0, "loaded"), (0.5, "such as model.layers.0.self_attn.o_proj.bias")])
def test_a_quantised_layer_may_have_a_bias_of_zeros(tmp_path: Path, value: float, says: str) -> None:
    """AutoGPTQ stores a bias for each layer, even for layers that have none."""
    layout, module = LAYOUTS["gptq-sym"], "model.layers.0.self_attn.o_proj"
    config = write_config(tmp_path, "llama", quantization_config=layout.config)
    tensors = {name: torch.zeros(shape) for name, shape in weight_shapes(config).items()}
    stored, _ = layout.quantize(torch.randn(tensors.pop(f"{module}.weight").shape))
    tensors |= {module + suffix: tensor for suffix, tensor in stored.items()}
    save_file({**tensors, f"{module}.bias": torch.full((48,), value)}, tmp_path / "model.safetensors")
    assert says in checked(tmp_path, config)
    assert checked(tmp_path, config) == loaded(tmp_path, config)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08\0\0\0\0\0\0\0{", b"\x02\0\0\0\0\0\0\0{}\0"])
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    config = write_config(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "not a readable safetensors file" in checked(tmp_path, config)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([], "has no model.safetensors: save the model with save_pretrained"),
        (["consolidated.safetensors"], "has no model.safetensors: save the model with save_pretrained"),
        (["pytorch_model-00001-of-00002.bin"], "00001-of-00002.bin is a pickle, which loramux never reads: save"),
        (["model-00001-of-00002.safetensors"], "no model.safetensors.index.json: download it"),
        (["a.gguf", "b.gguf"], "to serve a GGUF model, name its file, a.gguf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_directory_without_weights_is_explained(tmp_path: Path, names: list[str], says: str) -> None:
    config = write_config(tmp_path, "llama")
    for name in names:
        (tmp_path / name).touch()
    assert says in checked(tmp_path, config) == loaded(tmp_path, config)


def test_weights_that_git_has_not_downloaded_are_explained(tmp_path: Path) -> None:
    config = write_config(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    assert "is a Git LFS pointer" in checked(tmp_path, config) == loaded(tmp_path, config)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("[]", "malformed"),
        ('{"weight_map": []}', "malformed"),
        ("[" * 100_000, "malformed"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "outside the model directory"),
        (
            '{"weight_map": {"a": "absent.safetensors"}}',
            "absent.safetensors is missing, but model.safetensors.index.json names it",
        ),
    ],
)
def test_unusable_index_is_refused(tmp_path: Path, index: str, says: str) -> None:
    config = write_config(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert says in checked(tmp_path, config) == loaded(tmp_path, config)


@pytest.mark.parametrize("architecture", ["LlamaModel", "PhiModel"])
def test_headless_decoder_needs_no_head_and_may_store_none(tmp_path: Path, architecture: str) -> None:
    family = architecture.replace("Model", "ForCausalLM")
    config = write_config(tmp_path, family, architectures=[architecture])
    tensors = {name: torch.zeros(shape) for name, shape in weight_shapes(config).items()}
    assert not any("lm_head" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    assert checked(tmp_path, config) == loaded(tmp_path, config) == "loaded"
    save_file({**tensors, "lm_head.weight": torch.ones(31, 48)}, tmp_path / "model.safetensors")
    assert checked(tmp_path, config).endswith(f"the files have lm_head.weight: name {family}")
    assert "names a decoder without a head" in loaded(tmp_path, config)


def test_shards_are_read_together(tmp_path: Path) -> None:
    config = write_config(tmp_path, "llama")
    shapes = weight_shapes(config)
    shards = {name: f"part-{at % 2}.safetensors" for at, name in enumerate(shapes)}
    for shard in set(shards.values()):
        save_file({name: torch.zeros(shapes[name]) for name in shapes if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert checked(tmp_path, config) == loaded(tmp_path, config) == "loaded"


def test_absurd_number_of_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="num_hidden_layers 1000000000 is above 1024"):
        write_config(tmp_path, "llama", num_hidden_layers=10**9)


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "a layer is missing": {"num_hidden_layers": 3},
    "a layer too many": {"num_hidden_layers": 1},
    "many layers": {"num_hidden_layers": 100},
    "huge vocabulary": {"vocab_size": 2**70},
    "huge hidden size": {"hidden_size": 2**62, "head_dim": 16},
    "huge feed-forward": {"intermediate_size": 10**30},
    "huge number of heads": {"num_attention_heads": 2**40, "num_key_value_heads": 2**40, "head_dim": 16},
    "fewer heads": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "tied embeddings": {"tie_word_embeddings": True},
    "names of Phi-3": {"architectures": ["Phi3ForCausalLM"]},
    "names of Gemma 2": {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16},
    "biases of Qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "norms of Qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "experts": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Changes of `config.json` that contradict the tensors of a Llama with two layers."""


@pytest.mark.parametrize("changes", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_config_that_contradicts_its_tensors_is_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = weight_shapes(write_config(tmp_path, "llama"))
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = write_config(tmp_path, "llama", **changes)
    # Headers do not show whether a separate head equals the embedding. The two may find another tensor first.
    found = [loaded(tmp_path, config), *([] if config.tied_embeddings else [checked(tmp_path, config)])]
    for says in found:
        assert says != "loaded"
        assert "\n" not in says
        assert len(says) < 300
