"""Where each tensor of a Hugging Face model is in a GGUF model.

Most matrices stay in the file. Vectors, and the few matrices that must change, are small: `small` has their values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import ConversionRefused, printable
from loramux.adapter_store.formats.quantization.gguf import DOWN, GATE, UP
from loramux.adapter_store.formats.quantization.gguf_blocks import BLOCK_TYPES, stored_bytes
from loramux.adapter_store.gguf.base_records import OUTER, BaseRecord
from loramux.adapter_store.gguf.base_rope import FACTORS
from loramux.adapter_store.gguf.gguf_header import GgufTensor

Floats = npt.NDArray[np.float32]

_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,3})\.)?([a-z0-9_]{1,40})\.(weight|bias)", re.ASCII)
_GPT_OSS = "GptOssForCausalLM"
_STACKS = {
    "ffn_gate_exps": f"gate_up_proj{GATE}",
    "ffn_up_exps": f"gate_up_proj{UP}",
    "ffn_down_exps": f"down_proj{DOWN}",
}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MAX_SMALL_ELEMENTS = 1 << 24
"""Most elements of a tensor that is copied."""


@dataclass(slots=True)
class BaseTensors:
    """`stored` are entries of `GGUF_INDEX`, without the number of the file, and the tensor that they belong to."""

    stored: dict[str, tuple[dict[str, Any], GgufTensor]] = field(default_factory=dict)
    small: dict[str, Floats] = field(default_factory=dict)

    @property
    def types(self) -> list[str]:
        """The quantised types of the stored tensors, the most frequent first. Empty if all are plain floats."""
        counts: dict[str, int] = {}
        for name, (entry, _) in self.stored.items():
            if entry["dtype"] in BLOCK_TYPES or name.endswith((GATE, UP, DOWN)):
                counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + 1
        return sorted(counts, key=lambda dtype: -counts[dtype])


def place_tensors(
    record: BaseRecord,
    config: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    floats: Callable[[GgufTensor], Floats],
) -> BaseTensors:
    """Find each tensor's place. `floats` reads a tensor's values. Raises ConversionRefused for an unknown tensor."""
    found = BaseTensors()
    num_layers = int(config["num_hidden_layers"])
    heads = {"attn_q": int(config["num_attention_heads"]), "attn_k": int(config["num_key_value_heads"])}
    biases: dict[str, dict[str, Floats]] = {}
    for name, tensor in tensors.items():
        if name in FACTORS:
            continue
        match = _NAME.fullmatch(name)
        if match is None or (match[1] is not None and int(match[1]) >= num_layers):
            raise _unexpected(name)
        layer, kind, part = match.groups()
        prefix = "" if layer is None else f"model.layers.{int(layer)}."
        is_small = len(tensor.shape) < 2 or kind == "ffn_gate_inp_shexp"
        if record.architecture == _GPT_OSS and layer is not None:
            if kind in _STACKS and part == "weight":
                found.stored[f"{prefix}mlp.experts.{_STACKS[kind]}"] = _entry(tensor, tensor.shape, 0), tensor
                continue
            if kind in _STACKS:
                biases.setdefault(f"{prefix}mlp.experts.", {})[kind] = _small(tensor, floats)
                continue
            if kind in ("attn_sinks", "sinks"):
                found.small[f"{prefix}self_attn.sinks"] = _small(tensor, floats)
                continue
        module = record.modules.get(kind)
        if module is None or (layer is None) != (kind in OUTER):
            raise _unexpected(name)
        if "{}" in module:
            _place_experts(found, f"{prefix}{module}.{part}", tensor)
            continue
        paired = heads.get(kind, 0) if record.permutes else 0
        if paired and (not tensor.shape or tensor.shape[0] % (2 * paired)):
            raise ConversionRefused("base_mismatch", f"{tensor.shape} does not fit {paired} heads", name)
        target = f"{prefix}{module}.{part}"
        if not is_small:
            found.stored[target] = _entry(tensor, tensor.shape, paired), tensor
            continue
        values = _small(tensor, floats)
        if record.norm_shift and part == "weight" and kind.endswith("norm"):
            values = values + np.float32(record.norm_shift)
        if paired:
            values = values.reshape(paired, -1, 2).swapaxes(1, 2).reshape(values.shape)
        found.small[target] = values.reshape(1, -1) if kind == "ffn_gate_inp_shexp" else values
    for experts, of_layer in biases.items():
        found.small.update(_expert_biases(experts, of_layer))
    embedding = found.stored.get(_EMBEDDING)
    if _HEAD not in found.stored and embedding is not None and embedding[0]["dtype"] in BLOCK_TYPES:
        # The head is tied to an embedding in codes. As a separate weight, its products can use the codes.
        found.stored[_HEAD] = embedding
    return found


def _place_experts(found: BaseTensors, pattern: str, tensor: GgufTensor) -> None:
    """Give each expert of a stacked tensor its own entry."""
    if len(tensor.shape) != 3 or not all(tensor.shape):
        raise ConversionRefused("base_mismatch", f"experts of shape {list(tensor.shape)} are not stacked", tensor.name)
    num_experts, shape = tensor.shape[0], tensor.shape[1:]
    size = stored_bytes(tensor.dtype, shape)
    for expert in range(num_experts):
        begin = tensor.begin + expert * size
        entry = {"dtype": tensor.dtype, "shape": list(shape), "begin": begin, "end": begin + size}
        found.stored[pattern.format(expert)] = entry, tensor


def _entry(tensor: GgufTensor, shape: tuple[int, ...], paired_heads: int) -> dict[str, Any]:
    end = tensor.begin + stored_bytes(tensor.dtype, shape)
    entry: dict[str, Any] = {"dtype": tensor.dtype, "shape": list(shape), "begin": tensor.begin, "end": end}
    if paired_heads:
        entry["paired_heads"] = paired_heads
    return entry


def _small(tensor: GgufTensor, floats: Callable[[GgufTensor], Floats]) -> Floats:
    size = int(np.prod(tensor.shape, dtype=np.int64))
    if not 0 < size <= MAX_SMALL_ELEMENTS:
        raise ConversionRefused("base_mismatch", f"a vector of {size} elements is not supported", tensor.name)
    return floats(tensor)


def _expert_biases(prefix: str, of_layer: Mapping[str, Floats]) -> Iterator[tuple[str, Floats]]:
    """gpt-oss has the biases of gate and up in turns."""
    if set(of_layer) != set(_STACKS) or of_layer["ffn_gate_exps"].shape != of_layer["ffn_up_exps"].shape:
        raise ConversionRefused("missing_tensor", "a layer lacks a bias of its experts", prefix)
    turns = np.stack([of_layer["ffn_gate_exps"], of_layer["ffn_up_exps"]], axis=2)
    yield f"{prefix}gate_up_proj_bias", turns.reshape(len(turns), -1)
    yield f"{prefix}down_proj_bias", of_layer["ffn_down_exps"]


def _unexpected(name: str) -> ConversionRefused:
    message = f"the architecture has no tensor {printable(name, 100)}"
    return ConversionRefused("unexpected_tensor", message, name)
