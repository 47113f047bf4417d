"""Random tiny models in GGUF files, written as llama.cpp's converter does, with the `gguf` package's writer and names.

Some types cannot be quantised to by that package. Their tensors consist of random blocks, and the reference model gets
the values that the package gives to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from transformers import PreTrainedModel

Array = npt.NDArray[Any]

FLOATS = ("F32", "F16", "BF16")
QUANTIZABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
_HALVES: dict[str, tuple[int, ...]] = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""The places of the float16 values in blocks of the other types."""

TYPES = (*FLOATS, *QUANTIZABLE, *_HALVES)

ChooseType = Callable[[str, tuple[int, ...]], str]
"""The type of a matrix, by its name in the file and its shape."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How the converter stores one architecture: its name, whether it permutes q and k, and what it adds to norms."""

    architecture: str
    permutes: bool = False
    norm_shift: float = 0.0
    has_layer_norms: bool = False


def quantized(values: npt.NDArray[np.float32], dtype: str, generator: np.random.Generator) -> Array:
    """The stored form of a matrix: floats, or the bytes of its blocks."""
    kind = gguf.GGMLQuantizationType[dtype]
    if dtype in ("F32", "F16"):
        return values.astype(np.float32 if dtype == "F32" else np.float16)
    if dtype == "BF16" or dtype in QUANTIZABLE:
        return quants.quantize(values, kind)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*values.shape[:-1], values.shape[-1] // size, num_bytes), dtype=np.uint8)
    flat = blocks.reshape(*values.shape[:-1], -1)
    unit = np.float16(1)
    # First find the spread of the values with units of 1, then choose units that give the spread of `values`.
    for _ in range(2):
        for place in _HALVES[dtype]:
            blocks[..., place : place + 2] = np.array([unit]).view(np.uint8)
        unit = np.float16(values.std() / quants.dequantize(flat, kind).std())
    return flat


def dequantized(stored: Array, dtype: str) -> npt.NDArray[np.float32]:
    return np.asarray(quants.dequantize(stored, gguf.GGMLQuantizationType[dtype]), np.float32)


def permuted(stored: Array, num_heads: int) -> Array:
    """llama.cpp's order of the rows of q and k."""
    halves = stored.reshape(num_heads, 2, len(stored) // num_heads // 2, *stored.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(stored.shape))


def write_base(
    model: PreTrainedModel,
    path: Path,
    family: GgufFamily,
    choose_type: ChooseType,
    entries: dict[str, Any] | None = None,
    num_parts: int = 1,
) -> None:
    """Write `model`, and give it the weights that the file has. `entries` are added to the metadata."""
    generator = np.random.default_rng(1)
    config = model.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    size = math.ceil(len(model.state_dict()) / num_parts) if num_parts > 1 else 0
    writer = gguf.GGUFWriter(path, family.architecture, split_max_tensors=size)
    for key, value in {**metadata_of(config, family), **(entries or {})}.items():
        _add_entry(writer, key.replace("{arch}", family.architecture), value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    with torch.no_grad():
        for name, part in _tensors(model, names):
            values = part.detach().float().numpy()
            kind = name.split(".")[-2]
            is_vector = part.dim() < 2 or ".bias" in name
            dtype = "F32" if is_vector or kind.startswith("ffn_gate_inp") else choose_type(name, tuple(part.shape))
            if family.norm_shift and kind.endswith("norm") and name.endswith(".weight"):
                values = values + np.float32(family.norm_shift)
                part.copy_(torch.from_numpy(values - np.float32(family.norm_shift)))
            stored = quantized(values, dtype, generator)
            if not is_vector:
                part.copy_(torch.from_numpy(dequantized(stored, dtype)))
            if family.permutes and kind in heads:
                stored = permuted(stored, heads[kind])
            writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=gguf.GGMLQuantizationType[dtype])
        for name, factors in _rope_factors(config):
            writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: PreTrainedModel, names: gguf.TensorNameMap) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor's name in the file, and a view of the model's parameter."""
    is_tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if is_tied and name == "lm_head.weight":
            continue
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if name.endswith("experts.gate_up_proj"):
            yield from _gate_and_up(model, layer, tensor, ".weight")
        elif name.endswith("experts.gate_up_proj_bias"):
            yield f"blk.{layer}.ffn_gate_exps.bias", tensor[:, ::2]
            yield f"blk.{layer}.ffn_up_exps.bias", tensor[:, 1::2]
        elif name.endswith("experts.down_proj"):
            yield f"blk.{layer}.ffn_down_exps.weight", tensor.transpose(1, 2) if _is_gpt_oss(model) else tensor
        elif name.endswith("experts.down_proj_bias"):
            yield f"blk.{layer}.ffn_down_exps.bias", tensor
        elif name.endswith("self_attn.sinks"):
            yield f"blk.{layer}.attn_sinks.weight", tensor
        else:
            stem, dot, ending = name.rpartition(".")
            found = names.get_name(stem)
            assert found is not None, name
            yield found + dot + ending, tensor[0] if "ffn_gate_inp_shexp" in found else tensor


def _is_gpt_oss(model: PreTrainedModel) -> bool:
    return bool(model.config.model_type == "gpt_oss")


def _gate_and_up(
    model: PreTrainedModel, layer: str, tensor: torch.Tensor, ending: str
) -> Iterator[tuple[str, torch.Tensor]]:
    if _is_gpt_oss(model):
        # gpt-oss has the outputs of gate and up in turns, along the last axis.
        halves = tensor[..., ::2].transpose(1, 2), tensor[..., 1::2].transpose(1, 2)
    else:
        halves = tensor.chunk(2, dim=1)
    for kind, half in zip(("gate", "up"), halves, strict=True):
        yield f"blk.{layer}.ffn_{kind}_exps{ending}", half


def metadata_of(config: Any, family: GgufFamily) -> dict[str, Any]:
    """The entries that the converter writes for every architecture."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = config.rope_parameters or {}
    rope = ropes.get("full_attention", ropes)
    eps_key = "layer_norm_epsilon" if family.has_layer_norms else "layer_norm_rms_epsilon"
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        f"attention.{eps_key}": _eps(config),
        "rope.freq_base": float(rope.get("rope_theta") or 10000.0),
        "rope.dimension_count": int(head_dim * (rope.get("partial_rotary_factor") or 1.0)),
        "vocab_size": config.vocab_size,
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") in ("yarn", "longrope"):
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        found["rope.scaling.original_context_length"] = original
    if rope.get("rope_type") == "longrope":
        found["rope.scaling.attn_factor"] = 1.19
    if getattr(config, "sliding_window", None):
        found["attention.sliding_window"] = config.sliding_window
    tokens = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    return {**{f"{{arch}}.{key}": value for key, value in found.items()}, **tokens}


def _eps(config: Any) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
    return float(next((getattr(config, name) for name in names if hasattr(config, name)), 1e-5))


def _rope_factors(config: Any) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The factors by which the converter's file divides each frequency of Llama 3's and Phi 3's rotary embeddings."""
    rope = config.rope_parameters or {}
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32)
    if rope.get("rope_type") != "llama3":
        return
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factors = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    yield "rope_freqs.weight", np.array(factors, np.float32)


def _add_entry(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def by_turns(types: Sequence[str]) -> ChooseType:
    """Give each kind of matrix another type, and fall back to F16 for rows that the type's blocks do not divide."""
    seen: dict[str, str] = {}

    def choose(name: str, shape: tuple[int, ...]) -> str:
        kind = name.split(".")[-2]
        dtype = seen.setdefault(kind, types[len(seen) % len(types)])
        size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
        return dtype if shape[-1] % size == 0 else "F16"

    return choose
