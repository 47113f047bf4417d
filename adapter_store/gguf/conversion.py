"""Converts a llama.cpp LoRA adapter, as written by `convert_lora_to_gguf.py`, to PEFT's two files.

llama.cpp's names and layouts differ from PEFT's in three ways:

- Modules have other names.
- The A of the embedding is transposed.
- The architecture `llama` rotates pairs of neighbouring channels where transformers rotates the two halves of a head,
  so the rows of q and k are permuted.

The scale is `alpha / rank`, or 1 if alpha is 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import ConversionRefused, printable
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.files.tensor_writer import write_tensors
from loramux.adapter_store.formats.packed.module_places import (
    A_SUFFIX,
    B_SUFFIX,
    EMBEDDING_A_SUFFIX,
    EMBEDDING_B_SUFFIX,
    TENSOR_PREFIX,
)
from loramux.adapter_store.formats.version_files.peft_document import peft_document
from loramux.adapter_store.gguf.gguf_file import GgufFile

LLAMA, PHI3 = "llama", "phi3"
ARCHITECTURES = (LLAMA, "qwen2", "qwen3", "gemma2", "gemma3", PHI3)

_EMBEDDING = "token_embd"
_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED_UP = "mlp.gate_up_proj"
_OUTER = {_EMBEDDING: "model.embed_tokens", "output": "lm_head"}
_PERMUTED = ("attn_q", "attn_k")

_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,3})\.)?([a-z_]{1,20})\.weight\.lora_([ab])", re.ASCII)

Converted = Callable[[int], None]
"""Called with the number of bytes just converted."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """The names of one module's tensors in the file."""

    kind: str
    a: str
    b: str

    @property
    def is_embedding(self) -> bool:
        return self.kind == _EMBEDDING


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor to write, and how to compute it from the tensor `source` of the file."""

    source: str
    shape: tuple[int, ...]
    is_transposed: bool = False
    is_permuted: bool = False


def convert_gguf(
    path: Path, directory: Path, head_dim: int | None = None, converted: Converted = lambda _: None
) -> str:
    """Write the adapter's `adapter_config.json` and `adapter_model.safetensors` into `directory`.

    Returns the architecture. `head_dim` is the base's head dimension, which is needed to convert q and k of the
    architecture `llama`. Raises ConversionRefused. The shapes are not compared with a base, because validation does
    that.
    """
    with GgufFile(path) as file:
        architecture = _architecture(file.metadata)
        alpha, facts = _alpha(file.metadata), _facts(file.metadata)
        ranks: dict[str, int] = {}
        targets: dict[str, _Target] = {}
        for key, pair in sorted(_pairs(file, architecture).items(), key=_place):
            a, b = _targets(file, pair, architecture, head_dim)
            ranks[key] = a.shape[0]
            suffixes = (EMBEDDING_A_SUFFIX, EMBEDDING_B_SUFFIX) if pair.is_embedding else (A_SUFFIX, B_SUFFIX)
            targets.update((TENSOR_PREFIX + key + suffix, one) for suffix, one in zip(suffixes, (a, b), strict=True))

        def tensor(name: str) -> npt.NDArray[np.float32]:
            target = targets[name]
            matrix = file.float32(target.source)
            if target.is_transposed:
                matrix = matrix.T
            if target.is_permuted:
                assert head_dim is not None
                matrix = unpermuted(matrix, head_dim)
            converted(matrix.nbytes)
            return matrix

        document = peft_document(ranks, alpha, **facts)
        (directory / CONFIG_FILE).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        write_tensors(directory / TENSORS_FILE, {name: target.shape for name, target in targets.items()}, tensor)
    return architecture


def _targets(file: GgufFile, pair: _Pair, architecture: str, head_dim: int | None) -> tuple[_Target, _Target]:
    """Return the targets for a module's A and B, with PEFT's shapes."""
    a, b = file.tensors[pair.a].shape, file.tensors[pair.b].shape
    if pair.is_embedding:
        a = (a[1], a[0])
    if a[0] != b[1]:
        raise ConversionRefused("rank_mismatch", f"A and B have ranks {a[0]} and {b[1]}", pair.a)
    is_permuted = architecture == LLAMA and pair.kind in _PERMUTED
    if is_permuted:
        _check_heads(pair.b, b[0], head_dim)
    return _Target(pair.a, a, is_transposed=pair.is_embedding), _Target(pair.b, b, is_permuted=is_permuted)


def unpermuted(b: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of each head from pairs of neighbours to two halves, as in transformers."""
    num_rows, rank = b.shape
    pairs = b.reshape(num_rows // head_dim, head_dim // 2, 2, rank)
    return pairs.swapaxes(1, 2).reshape(num_rows, rank)


def _architecture(metadata: Mapping[str, Any]) -> str:
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != wanted:
            found = printable(str(metadata.get(key)), 60)
            message = f"{key} is {found}, not {wanted}: this is not a LoRA adapter"
            raise ConversionRefused("not_an_adapter", message, key)
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        shown = printable(str(architecture), 60)
        message = f"the architecture {shown} is not supported; supported: {', '.join(ARCHITECTURES)}"
        raise ConversionRefused("unsupported_architecture", message, "general.architecture")
    return str(architecture)


def _alpha(metadata: Mapping[str, Any]) -> float | None:
    """Return the alpha that all modules share, or None if every scale is 1."""
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if type(alpha) is not float or not math.isfinite(alpha) or alpha < 0:
        raise ConversionRefused("alpha_out_of_range", "alpha must be a number of at least 0", "adapter.lora.alpha")
    return alpha or None


def _facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration entries that come from the metadata: the invocation tokens and the base's name."""
    facts: dict[str, Any] = {}
    tokens = metadata.get("adapter.alora.invocation_tokens")
    if tokens is not None:
        facts["alora_invocation_tokens"] = tokens
    base = metadata.get("general.base_model.0.name")
    if isinstance(base, str):
        facts["base_model_name_or_path"] = base
    return facts


def _pairs(file: GgufFile, architecture: str) -> dict[str, _Pair]:
    """Return the names of each module's tensors, by the module's name in PEFT."""
    halves: dict[str, dict[str, tuple[str, str]]] = {}
    for name in file.tensors:
        match = _NAME.fullmatch(name)
        key = None if match is None else _key(match[1], match[2], architecture)
        if match is None or key is None:
            message = f"{printable(name, 100)} is not a LoRA matrix of a module that adapters may change"
            raise ConversionRefused("unexpected_tensor", message, name)
        halves.setdefault(key, {})[match[3]] = (match[2], name)
    for found in halves.values():
        if len(found) != 2:
            ((_, name),) = found.values()
            raise ConversionRefused("missing_tensor", "a module must have both lora_a and lora_b", name)
    if not halves:
        raise ConversionRefused("missing_tensor", "the file has no tensors")
    return {key: _Pair(found["a"][0], found["a"][1], found["b"][1]) for key, found in halves.items()}


def _key(layer: str | None, kind: str, architecture: str) -> str | None:
    if layer is None:
        return _OUTER.get(kind)
    if kind not in _MODULES:
        return None
    module = _FUSED_UP if architecture == PHI3 and kind == "ffn_up" else _MODULES[kind]
    return f"model.layers.{int(layer)}.{module}"


def _place(item: tuple[str, _Pair]) -> tuple[int, str]:
    """Return a sort key: modules outside the layers come first, then each layer's modules."""
    parts = item[0].split(".")
    return (int(parts[2]) if len(parts) > 2 else -1, item[0])


def _check_heads(name: str, num_rows: int, head_dim: int | None) -> None:
    if head_dim is None:
        message = "q and k of this architecture are stored in llama.cpp's order: name the base's directory with --model"
        raise ConversionRefused("base_needed", message, name)
    if head_dim < 2 or head_dim % 2 or num_rows % head_dim:
        message = f"{num_rows} rows cannot be divided into heads of {head_dim}: the adapter is for another base"
        raise ConversionRefused("base_mismatch", message, name)
