"""Writes adapters as llama.cpp's `convert_lora_to_gguf.py` does, with the `gguf` package's writer and names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}
TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def write_gguf(
    path: Path,
    peft_tensors: Mapping[str, torch.Tensor],
    *,
    alpha: float | None,
    architecture: str = "llama",
    num_heads: int = 4,
    num_kv_heads: int = 2,
    dtype: str = "F32",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write PEFT tensors as a llama.cpp adapter. `metadata` replaces entries, or removes them with None."""
    names = gguf.get_tensor_name_map(ARCHITECTURES.get(architecture, gguf.MODEL_ARCH.LLAMA), 64)
    writer = gguf.GGUFWriter(path, architecture)
    entries: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora", "general.name": "An adapter"}
    for key, value in {**entries, **(metadata or {})}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in peft_tensors.items():
        stem, half = _parse(name)
        values = tensor.float()
        if architecture == "llama" and half == "b" and stem.endswith("q_proj"):
            values = permuted(values, num_heads)
        if architecture == "llama" and half == "b" and stem.endswith("k_proj"):
            values = permuted(values, num_kv_heads)
        dest = names.get_name(f"{stem}.weight", try_suffixes=(".weight",))
        assert dest is not None, stem
        if dest.startswith("token_embd") and half == "a":
            values = values.T
        array = values.contiguous().numpy()
        writer.add_tensor(f"{dest}.lora_{half}", gguf.quantize(array, TYPES[dtype]), raw_dtype=TYPES[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permuted(weights: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows of q or k in llama.cpp order."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def rounded(tensor: torch.Tensor, dtype: str) -> np.ndarray[Any, Any]:
    """Return the tensor, rounded to this type."""
    kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    return tensor.to(kind).float().numpy()


def _parse(name: str) -> tuple[str, str]:
    """Split a PEFT tensor's name into its module and its half, A or B."""
    stem, _, half = name.removeprefix("base_model.model.").partition(".lora_")
    return stem, {"A.weight": "a", "B.weight": "b", "embedding_A": "a", "embedding_B": "b"}[half]
