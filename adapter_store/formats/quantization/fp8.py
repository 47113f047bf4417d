"""FP8 checkpoints: `quant_method` fp8 of transformers and vLLM, and fbgemm_fp8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization.grids import grouped_scales
from loramux.adapter_store.formats.quantization.parts import Parts
from loramux.adapter_store.formats.quantization.weight_format import WeightFormat, matrix_shape
from loramux.kernels.quantized import E4M3, QuantizedWeight

_SCALES = (".weight_scale_inv", ".weight_scale")


@dataclass(frozen=True, slots=True)
class Fp8Format(WeightFormat):
    """Weights in float8_e4m3fn with one scale per tensor, per output, or per block `[outputs, inputs]`.

    Stored scales of activations are ignored. With `rounds_inputs`, the checkpoint says that inputs are rounded to FP8
    with scales that depend on the inputs alone.
    """

    block: tuple[int, int] | None
    rounds_inputs: bool

    name: ClassVar[str] = "fp8"
    suffixes: ClassVar[tuple[str, ...]] = (
        ".weight",
        *_SCALES,
        ".input_scale",
        ".input_scale_ub",
        ".activation_scale",
    )

    def is_coded(self, tensors: Mapping[str, MappedTensor]) -> bool:
        return ".weight" in tensors and tensors[".weight"].dtype == "F8_E4M3"

    def shape(self, parts: Parts) -> tuple[int, ...]:
        return matrix_shape(parts, ".weight", "F8_E4M3")

    def read(self, parts: Parts) -> QuantizedWeight:
        shape = matrix_shape(parts, ".weight", "F8_E4M3")
        if all(parts.has(suffix) for suffix in _SCALES):
            raise parts.wrong(".weight", "has two scale tensors")
        suffix = _SCALES[1] if parts.has(_SCALES[1]) else _SCALES[0]
        return fp8_weight(parts, grouped_scales(parts, suffix, shape, self.block))


def fp8_weight(parts: Parts, scales: npt.NDArray[np.float32]) -> QuantizedWeight:
    codes = parts.tensor(".weight", "F8_E4M3").array()
    if (codes & 127 == 127).any():
        raise parts.wrong(".weight", "contains NaN")
    return QuantizedWeight(codes=codes, codebook=E4M3, scales=scales)


def parse_fp8(config: Mapping[str, Any]) -> Fp8Format:
    fmt = config.get("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise BaseNotSupported(f"quantization_config.fmt is {fmt!r:.60}; only e4m3 is supported")
    # fbgemm_fp8 has no other scheme.
    rounds_inputs = config.get("quant_method") == "fbgemm_fp8" or config.get("activation_scheme") == "dynamic"
    return Fp8Format(block_size(config, "weight_block_size"), rounds_inputs)


def block_size(config: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    block = config.get(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise BaseNotSupported(f"quantization_config.{name} is {block!r:.60}, not two positive numbers")
    return block[0], block[1]
