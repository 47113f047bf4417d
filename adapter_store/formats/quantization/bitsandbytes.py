"""Checkpoints of bitsandbytes: NF4 and FP4 (QLoRA), and LLM.int8."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization.packing import swap_pairs
from loramux.adapter_store.formats.quantization.parts import Parts
from loramux.adapter_store.formats.quantization.weight_format import (
    WeightFormat,
    affine_weight,
    flip_sign,
    matrix_shape,
)
from loramux.kernels.quantized import QuantizedWeight

_MAX_STATE_BYTES = 4096
_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")


@dataclass(frozen=True, slots=True)
class _State:
    """The required fields of a 4-bit weight's `quant_state`. `nested_block` is 0 if scales are not quantised."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    nested_offset: float


@dataclass(frozen=True, slots=True)
class BitsAndBytesFormat(WeightFormat):
    """4-bit weights, two in a byte with the higher bits first, or int8 weights.

    Scales of 4-bit weights (`absmax`) belong to blocks of consecutive weights. They can themselves be quantised in
    blocks (double quantisation). The scales of int8 weights (`SCB`) are the rows' largest magnitudes, which have the
    code 127 or -127.
    """

    bits: int

    suffixes: ClassVar[tuple[str, ...]] = (
        ".weight",
        *_STATES,
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        ".SCB",
        ".weight_format",
    )

    @property
    def name(self) -> str:
        return "bitsandbytes int8" if self.bits == 8 else "bitsandbytes 4-bit"

    def is_coded(self, tensors: Mapping[str, MappedTensor]) -> bool:
        return ".weight" in tensors and any(suffix in tensors for suffix in (*_STATES, ".SCB"))

    def shape(self, parts: Parts) -> tuple[int, ...]:
        if self.bits == 8:
            return matrix_shape(parts, ".weight", "I8")
        return _state(parts).shape

    def read(self, parts: Parts) -> QuantizedWeight:
        if self.bits == 4:
            return _four_bits(parts)
        shape = matrix_shape(parts, ".weight", "I8")
        # Zeros are valid: the largest magnitude of a row of zeros is 0.
        largest = parts.floats(".SCB")
        if largest.size != shape[0]:
            raise parts.wrong(".SCB", f"has shape {list(largest.shape)} for {shape[0]} outputs")
        if parts.has(".weight_format") and parts.tensor(".weight_format", "U8").array().any():
            raise parts.wrong(".weight_format", "specifies a weight layout other than row-major")
        scales = largest.reshape(-1, 1) / np.float32(127)
        return affine_weight(parts, 8, flip_sign(parts.tensor(".weight", "I8").array()), scales, None)


def _four_bits(parts: Parts) -> QuantizedWeight:
    state = _state(parts)
    out_features, in_features = state.shape
    stored = parts.tensor(".weight", "U8", "BF16", "F16", "F32")
    if stored.nbytes * 2 != out_features * in_features:
        raise parts.wrong(".weight", f"has {stored.nbytes} bytes for {list(state.shape)} weights of 4 bits")
    codebook = parts.floats(".weight.quant_map").reshape(-1)
    if codebook.size != 16:
        raise parts.wrong(".weight.quant_map", f"has {codebook.size} values, not 16")
    # A group must divide both a row and a block. It is smaller than a block if a row is not a whole number of blocks.
    group = math.gcd(in_features, state.block)
    if group % 2:
        raise parts.wrong(".weight", f"packs rows of {in_features} weights, an odd number")
    absmax = _absmax(parts, state, -(-out_features * in_features // state.block))
    scales = absmax[np.arange(out_features * in_features // group) * group // state.block]
    codes = stored.array().reshape(-1).view(np.uint8).reshape(out_features, in_features // 2)
    return QuantizedWeight(codes=swap_pairs(codes), codebook=codebook, scales=scales.reshape(out_features, -1))


def _absmax(parts: Parts, state: _State, num_blocks: int) -> npt.NDArray[np.float32]:
    if not state.nested_block:
        values = parts.floats(".weight.absmax").reshape(-1)
    else:
        codes = parts.tensor(".weight.absmax", "U8").array().reshape(-1)
        nested_map = parts.floats(".weight.nested_quant_map").reshape(-1)
        nested = parts.floats(".weight.nested_absmax").reshape(-1)
        if nested_map.size != 256 or nested.size != -(-codes.size // state.nested_block):
            raise parts.wrong(".weight.nested_absmax", f"does not fit {codes.size} scales")
        values = nested_map.take(codes) * nested.repeat(state.nested_block)[: codes.size]
        values += np.float32(state.nested_offset)
    if values.size != num_blocks:
        raise parts.wrong(
            ".weight.absmax", f"has {values.size} scales for {num_blocks} blocks of {state.block} weights"
        )
    return values


def _state(parts: Parts) -> _State:
    suffix = next((suffix for suffix in _STATES if parts.has(suffix)), _STATES[0])
    stored = parts.tensor(suffix, "U8")
    if stored.nbytes > _MAX_STATE_BYTES:
        raise parts.wrong(suffix, f"has more than {_MAX_STATE_BYTES} bytes")
    try:
        fields = json.loads(stored.array().tobytes())
        shape = tuple(fields["shape"])
        block, nested_block = fields["blocksize"], fields.get("nested_blocksize", 0)
        offset = float(fields.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise parts.wrong(suffix, "does not describe a weight") from error
    sizes = (*shape, block, nested_block or 1)
    if len(shape) != 2 or any(type(size) is not int or not 0 < size < 1 << 31 for size in sizes):
        raise parts.wrong(suffix, f"describes a weight {fields['shape']!r:.60} with blocks of {block!r:.60}")
    if not math.isfinite(offset):
        raise parts.wrong(suffix, "has an offset that is not finite")
    return _State((shape[0], shape[1]), block, nested_block, offset)


def parse_bitsandbytes(config: Mapping[str, Any]) -> BitsAndBytesFormat:
    is_4bit, is_8bit = (config.get(name, config.get(f"_{name}")) for name in ("load_in_4bit", "load_in_8bit"))
    if bool(is_4bit) == bool(is_8bit):
        raise BaseNotSupported("quantization_config must set exactly one of load_in_4bit and load_in_8bit")
    return BitsAndBytesFormat(4 if is_4bit else 8)
