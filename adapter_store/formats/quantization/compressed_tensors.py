"""Checkpoints of compressed-tensors, as llm-compressor writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization.codebooks import E2M1, E8M0
from loramux.adapter_store.formats.quantization.fp8 import block_size, fp8_weight
from loramux.adapter_store.formats.quantization.grids import check_group, grouped_scales
from loramux.adapter_store.formats.quantization.packing import pack, unpack, words_as_codes
from loramux.adapter_store.formats.quantization.parts import CodedWeight, Parts
from loramux.adapter_store.formats.quantization.reordered import ReorderedWeight, inputs_by_group
from loramux.adapter_store.formats.quantization.weight_format import (
    WeightFormat,
    affine_weight,
    flip_sign,
    group_size,
    integer,
    matrix_shape,
)
from loramux.kernels.quantized import QuantizedWeight

_INT4, _INT8, _FP8, _FP4 = "int4", "int8", "fp8", "fp4"
_KINDS = {("int", 4): _INT4, ("int", 8): _INT8, ("float", 8): _FP8, ("float", 4): _FP4}
_CODED = (".weight_packed", ".weight")
_MINIMUM = ".weight_minimum"


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantisation of one kind of weight. If `group` and `block` are None, scales are per output or per tensor."""

    group: int | None
    block: tuple[int, int] | None
    is_symmetric: bool


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat(WeightFormat):
    """The kinds of quantised weights in a checkpoint, each with one scheme. A weight's tensors determine its kind:

    - int8: `weight` int8; or `weight_packed` int32, four codes in a word, each the value plus 128;
    - int4: `weight_packed` int32, eight codes in a word, each the value plus 8;
    - fp8: `weight` float8_e4m3fn;
    - fp4: `weight_packed` uint8, two values of mxfp4 or nvfp4 in a byte.

    Instead of zero points, weights that are not symmetric can have the minimum of each group in `weight_minimum`. Only
    loramux's own int4 has these. Stored scales of activations, keys and values are ignored. With `rounds_inputs`, the
    checkpoint says that the inputs of all fp8 weights are rounded to FP8 with scales that depend on the inputs alone.
    """

    schemes: tuple[tuple[str, Scheme], ...]
    rounds_inputs: bool

    suffixes: ClassVar[tuple[str, ...]] = (
        *_CODED,
        ".weight_scale",
        ".weight_shape",
        ".weight_zero_point",
        _MINIMUM,
        ".weight_g_idx",
        ".weight_global_scale",
        ".input_scale",
        ".input_zero_point",
        ".input_global_scale",
        ".output_scale",
        ".output_zero_point",
    )

    @property
    def name(self) -> str:
        return f"compressed-tensors {'/'.join(kind for kind, _ in self.schemes)}"

    def is_coded(self, tensors: Mapping[str, MappedTensor]) -> bool:
        return ".weight_packed" in tensors or (".weight" in tensors and tensors[".weight"].dtype in ("I8", "F8_E4M3"))

    def shape(self, parts: Parts) -> tuple[int, ...]:
        kind, _ = self._scheme(parts)
        if not parts.has(".weight_packed"):
            return matrix_shape(parts, ".weight", "I8", "F8_E4M3")
        out_features, num_packed = matrix_shape(parts, ".weight_packed", "I32", "U8")
        word_bits = 8 if kind == _FP4 else 32
        return out_features, num_packed * word_bits // (8 if kind == _INT8 else 4)

    def read(self, parts: Parts) -> CodedWeight:
        kind, scheme = self._scheme(parts)
        out_features, in_features = self.shape(parts)
        if kind == _FP4:
            return _fp4(parts, out_features, in_features)
        scales = grouped_scales(parts, ".weight_scale", (out_features, in_features), scheme.block)
        if scheme.block is None:
            check_group(parts, ".weight_scale", scales.shape[1], in_features, scheme.group)
        if kind == _FP8:
            return fp8_weight(parts, scales)
        bits = 8 if kind == _INT8 else 4
        if parts.has(".weight_packed"):
            _check_stored_shape(parts, out_features, in_features)
            codes = np.ascontiguousarray(parts.tensor(".weight_packed", "I32").array()).view(np.uint8)
        else:
            codes = flip_sign(parts.tensor(".weight", "I8").array())
        minima = None if scheme.is_symmetric or not parts.has(_MINIMUM) else _minima(parts, scales.shape)
        zeros = None if scheme.is_symmetric or minima is not None else _zero_codes(parts, bits, scales.shape)
        order = inputs_by_group(parts, ".weight_g_idx", in_features, scales.shape[1])
        if order is not None:
            codes = pack(unpack(codes)[:, order]) if bits == 4 else codes[:, order]
        weight = affine_weight(parts, bits, codes, scales, zeros, minima)
        return weight if order is None else ReorderedWeight(weight, order)

    def _scheme(self, parts: Parts) -> tuple[str, Scheme]:
        kind = self._stored_kind(parts)
        for declared, scheme in self.schemes:
            if declared == kind:
                return kind, scheme
        suffix = next(suffix for suffix in _CODED if parts.has(suffix))
        declared = " and ".join(kind for kind, _ in self.schemes)
        raise parts.wrong(suffix, f"is {kind}, but quantization_config says {declared}")

    def _stored_kind(self, parts: Parts) -> str:
        if not parts.has(".weight_packed"):
            return _INT8 if parts.tensor(".weight", "I8", "F8_E4M3").dtype == "I8" else _FP8
        packed = parts.tensor(".weight_packed", "I32", "U8")
        if packed.dtype == "U8":
            return _FP4
        kinds = [kind for kind, _ in self.schemes if kind in (_INT4, _INT8)]
        if len(kinds) == 1:
            return kinds[0]
        stored = parts.array(".weight_shape", "I64", (2,))
        return _INT4 if len(packed.shape) == 2 and packed.shape[1] * 8 == stored[1] else _INT8


def _check_stored_shape(parts: Parts, *shape: int) -> None:
    stored = parts.array(".weight_shape", "I64", (2,)).tolist()
    if stored != list(shape):
        raise parts.wrong(".weight_shape", f"says {stored}, but {list(shape)} weights are packed")


def _zero_codes(parts: Parts, bits: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return the zero points as unsigned codes `[out, groups]`. In int32 words, they are packed along the outputs."""
    suffix = ".weight_zero_point"
    if parts.tensor(suffix, "I8", "I32").dtype == "I8":
        zeros = flip_sign(parts.array(suffix, "I8", shape))
        return zeros - np.uint8(120) if bits == 4 else zeros
    words = parts.array(suffix, "I32", (-(-shape[0] * bits // 32), shape[1]))
    return words_as_codes(words.T, bits).T[: shape[0]]


def _minima(parts: Parts, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    minima = parts.floats(_MINIMUM)
    if minima.shape != shape:
        raise parts.wrong(_MINIMUM, f"has shape {list(minima.shape)}, not {list(shape)}")
    return minima


def _fp4(parts: Parts, out_features: int, in_features: int) -> QuantizedWeight:
    stored = parts.tensor(".weight_scale", "U8", "F8_E8M0", "F8_E4M3")
    group = 16 if stored.dtype == "F8_E4M3" else 32
    if in_features % group or stored.shape != (out_features, in_features // group):
        raise parts.wrong(".weight_scale", f"has shape {list(stored.shape)}; groups have {group} inputs")
    if stored.dtype == "F8_E4M3":
        overall = parts.scales(".weight_global_scale")
        if overall.size != 1:
            raise parts.wrong(".weight_global_scale", "has more than one value")
        # The stored scales were multiplied by the global scale.
        scales = parts.scales(".weight_scale") / overall.reshape(())
    else:
        scales = E8M0.take(stored.array())
        if np.isnan(scales).any():
            raise parts.wrong(".weight_scale", "contains a value that is not finite")
    return QuantizedWeight(codes=parts.tensor(".weight_packed", "U8").array(), codebook=E2M1, scales=scales)


def parse_compressed_tensors(config: Mapping[str, Any]) -> CompressedTensorsFormat:
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise BaseNotSupported("sparse weights of compressed-tensors cannot be read; use a dense checkpoint")
    if config.get("transform_config"):
        raise BaseNotSupported("quantization_config.transform_config is not supported; use a checkpoint without it")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not 1 <= len(groups) <= 64:
        raise BaseNotSupported("quantization_config.config_groups must be an object with 1 to 64 groups")
    schemes: dict[str, Scheme] = {}
    rounds_inputs: list[bool] = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise BaseNotSupported("a group of quantization_config.config_groups does not quantise weights")
        kind, scheme = _parse_scheme(weights)
        if schemes.setdefault(kind, scheme) != scheme:
            raise BaseNotSupported(f"quantization_config.config_groups has two schemes for {kind} weights")
        if kind == _FP8:
            rounds_inputs.append(_rounds_to_fp8(group.get("input_activations")))
    return CompressedTensorsFormat(tuple(schemes.items()), bool(rounds_inputs) and all(rounds_inputs))


def _rounds_to_fp8(inputs: object) -> bool:
    if not isinstance(inputs, Mapping):
        return False
    return inputs.get("type") == "float" and inputs.get("num_bits") == 8 and inputs.get("dynamic") is True


def _parse_scheme(weights: Mapping[str, Any]) -> tuple[str, Scheme]:
    number = (str(weights.get("type", "int")), integer(weights, "num_bits", (4, 8)))
    if number not in _KINDS:
        raise BaseNotSupported(f"weights of type {number[0]!r:.60} and {number[1]} bits cannot be read")
    strategy = weights.get("strategy")
    is_grouped = strategy in ("group", "tensor_group") or (strategy is None and weights.get("group_size"))
    block = block_size(weights, "block_structure") if strategy == "block" else None
    return _KINDS[number], Scheme(
        group=group_size(weights) if is_grouped else None,
        block=block,
        is_symmetric=bool(weights.get("symmetric", True)),
    )
