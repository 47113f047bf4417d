"""mxfp4 as in gpt-oss, where one tensor of blocks and one tensor of scales contain the weights of all experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization.codebooks import E2M1, E8M0
from loramux.adapter_store.formats.quantization.parts import Parts
from loramux.kernels.quantized import QuantizedWeight

_BLOCK_BYTES = 16
"""Number of bytes in a block of 32 values that share a scale."""


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Experts:
    """The weights of all experts, `[num_experts, in, out]`. Each expert's quantised weight is `[out, in]`."""

    experts: tuple[QuantizedWeight, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        out_features, in_features = self.experts[0].shape
        return len(self.experts), in_features, out_features

    def dequantize(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        return np.stack([expert.dequantize().T for expert in self.experts[begin:end]])


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Reads `blocks` uint8 `[num_experts, out, in / 32, 16]` and `scales` uint8 `[num_experts, out, in / 32]`."""

    name: ClassVar[str] = "mxfp4"
    suffixes: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")

    def is_coded(self, tensors: Mapping[str, MappedTensor]) -> bool:
        return "_blocks" in tensors

    def weight_name(self, module: str) -> str:
        return module

    def shape(self, parts: Parts) -> tuple[int, ...]:
        shape = parts.tensor("_blocks", "U8").shape
        if len(shape) != 4 or not all(shape) or shape[3] != _BLOCK_BYTES:
            raise parts.wrong("_blocks", f"has shape {list(shape)}, not [experts, outputs, blocks, {_BLOCK_BYTES}]")
        return shape[0], shape[2] * _BLOCK_BYTES * 2, shape[1]

    def read(self, parts: Parts) -> Mxfp4Experts:
        num_experts, in_features, out_features = self.shape(parts)
        blocks = parts.tensor("_blocks", "U8").array().reshape(num_experts, out_features, in_features // 2)
        exponents = parts.array("_scales", "U8", (num_experts, out_features, in_features // 32))
        if (exponents == 255).any():
            raise parts.wrong("_scales", "contains a value that is not finite")
        return Mxfp4Experts(
            tuple(
                QuantizedWeight(codes=codes, codebook=E2M1, scales=E8M0.take(scales))
                for codes, scales in zip(blocks, exponents, strict=True)
            )
        )


def parse_mxfp4(config: Mapping[str, Any]) -> Mxfp4Format:
    return Mxfp4Format()
