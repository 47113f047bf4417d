"""Quantised weights in GGUF files, in the block types of llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.files.float_formats import STORAGE, to_float32
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization.gguf_blocks import BLOCK_TYPES, read_blocks
from loramux.adapter_store.formats.quantization.mxfp4 import Mxfp4Experts
from loramux.adapter_store.formats.quantization.parts import CodedWeight, Parts
from loramux.kernels.quantized import QuantizedWeight, concatenate

GATE, UP, DOWN = ".gate", ".up", ".down"
"""Suffixes of the stacked experts of gpt-oss, which GGUF files store separately as `[num_experts, out, in]`."""

_STACKED = ("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True, slots=True, eq=False)
class FloatExperts:
    """The weights of all experts, `[num_experts, in, out]`, as floats. Expert i has the rows of `parts` in turns."""

    parts: tuple[MappedTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, rows, columns = self.parts[0].shape
        return num_experts, columns, rows * len(self.parts)

    def dequantize(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        end = self.shape[0] if end is None else min(end, self.shape[0])
        rows = [_floats(part, begin, end) for part in self.parts]
        turns = np.stack(rows, axis=2).reshape(end - begin, -1, rows[0].shape[2])
        return turns.swapaxes(1, 2)


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """Reads tensors in one of `BLOCK_TYPES`, and the experts of gpt-oss in any type."""

    types: tuple[str, ...]

    suffixes: ClassVar[tuple[str, ...]] = (".weight", GATE, UP, DOWN)

    @property
    def name(self) -> str:
        return f"gguf {' and '.join(self.types)}"

    def is_coded(self, tensors: Mapping[str, MappedTensor]) -> bool:
        return any(suffix != ".weight" or it.dtype in BLOCK_TYPES for suffix, it in tensors.items())

    def weight_name(self, module: str) -> str:
        return module if module.endswith(_STACKED) else f"{module}.weight"

    def shape(self, parts: Parts) -> tuple[int, ...]:
        if ".weight" in parts.tensors:
            return parts.tensors[".weight"].shape
        return FloatExperts(_experts(parts)).shape

    def read(self, parts: Parts) -> CodedWeight:
        if ".weight" in parts.tensors:
            return _read_rows(parts.tensors[".weight"])
        stacks = _experts(parts)
        num_experts = stacks[0].shape[0]
        if all(stack.dtype in BLOCK_TYPES for stack in stacks):
            experts = [_in_turns([_expert(stack, index) for stack in stacks]) for index in range(num_experts)]
            coded = [expert for expert in experts if expert is not None]
            if len(coded) == num_experts:
                return Mxfp4Experts(tuple(coded))
        return FloatExperts(stacks)


def parse_gguf(config: Mapping[str, Any]) -> GgufFormat:
    types = config.get("types")
    if not isinstance(types, list) or not types or any(one not in BLOCK_TYPES and one not in STORAGE for one in types):
        raise BaseNotSupported(
            "the quantisation 'gguf' (quantization_config in config.json) lists no types: serve the GGUF file itself"
        )
    return GgufFormat(tuple(types))


def _experts(parts: Parts) -> tuple[MappedTensor, ...]:
    """The stacks whose rows the experts' weights have in turns: gate and up, or down alone."""
    suffixes = (DOWN,) if DOWN in parts.tensors else (GATE, UP)
    stacks = tuple(parts.tensor(suffix, *BLOCK_TYPES, *STORAGE) for suffix in suffixes)
    for suffix, stack in zip(suffixes, stacks, strict=True):
        if len(stack.shape) != 3 or not all(stack.shape) or stack.shape != stacks[0].shape:
            raise parts.wrong(suffix, f"has shape {list(stack.shape)}")
    return stacks


def _read_rows(tensor: MappedTensor) -> QuantizedWeight:
    if len(tensor.shape) != 2:
        raise ValueError(f"a quantised tensor of shape {list(tensor.shape)} is not a matrix")
    weight = read_blocks(tensor.dtype, tensor.stored_bytes(), *tensor.shape)
    return weight.outputs(tensor.row_order()) if tensor.paired_heads else weight


def _expert(stack: MappedTensor, index: int) -> QuantizedWeight:
    num_experts, rows, columns = stack.shape
    stored = stack.stored_bytes().reshape(num_experts, -1)[index]
    return read_blocks(stack.dtype, stored, rows, columns)


def _in_turns(parts: list[QuantizedWeight]) -> QuantizedWeight | None:
    """A weight with the rows of all parts in turns, or None if their codes differ in kind."""
    whole = concatenate(parts)
    if whole is None or len(parts) == 1:
        return whole
    return whole.outputs(np.arange(whole.out_features).reshape(len(parts), -1).T.reshape(-1))


def _floats(stack: MappedTensor, begin: int, end: int) -> npt.NDArray[np.float32]:
    """The weights of experts `[begin, end)`, float32 `[end - begin, rows, columns]`."""
    _, rows, columns = stack.shape
    if stack.dtype in BLOCK_TYPES:
        return np.stack([_expert(stack, index).dequantize() for index in range(begin, end)])
    return to_float32(stack.array()[begin:end], stack.dtype).reshape(end - begin, rows, columns)
