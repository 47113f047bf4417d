"""4-bit AWQ checkpoints, in the layout of AWQ's GEMM kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization.grids import check_group
from loramux.adapter_store.formats.quantization.packing import pack, words_as_codes
from loramux.adapter_store.formats.quantization.parts import Parts
from loramux.adapter_store.formats.quantization.weight_format import (
    WeightFormat,
    affine_weight,
    group_size,
    integer,
    matrix_shape,
)
from loramux.kernels.quantized import QuantizedWeight

_PER_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight outputs' codes within a 32-bit word."""


@dataclass(frozen=True, slots=True)
class AwqFormat(WeightFormat):
    """Reads `qweight` int32 `[in, out / 8]`, `qzeros` int32 `[groups, out / 8]` and `scales` `[groups, out]`."""

    group: int | None
    has_zeros: bool

    name: ClassVar[str] = "awq int4"
    suffixes: ClassVar[tuple[str, ...]] = (".qweight", ".qzeros", ".scales")

    def is_coded(self, tensors: Mapping[str, MappedTensor]) -> bool:
        return ".qweight" in tensors

    def shape(self, parts: Parts) -> tuple[int, ...]:
        in_features, num_words = matrix_shape(parts, ".qweight", "I32")
        return num_words * _PER_WORD, in_features

    def read(self, parts: Parts) -> QuantizedWeight:
        in_features, num_words = matrix_shape(parts, ".qweight", "I32")
        scales = parts.scales(".scales")
        check_group(parts, ".scales", scales.shape[0], in_features, self.group)
        if scales.shape[1:] != (num_words * _PER_WORD,):
            raise parts.wrong(".scales", f"has shape {list(scales.shape)} for {num_words * _PER_WORD} outputs")
        zeros = None
        if self.has_zeros:
            zeros = _by_output(parts.array(".qzeros", "I32", (scales.shape[0], num_words)))
        codes = pack(_by_output(parts.tensor(".qweight", "I32").array()))
        return affine_weight(parts, 4, codes, np.ascontiguousarray(scales.T), zeros)


def _by_output(words: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the codes of words `[n, out / 8]` as uint8 `[out, n]`."""
    codes = words_as_codes(words, 4).reshape(words.shape[0], -1, _PER_WORD)
    return codes[..., _PLACES].reshape(words.shape[0], -1).T


def parse_awq(config: Mapping[str, Any]) -> AwqFormat:
    # AutoAWQ calls the number of bits w_bit.
    integer({"bits": config.get("w_bit", 4), **config}, "bits", (4,))
    version = str(config.get("version", config.get("format", "gemm"))).lower()
    if version != "gemm":
        raise BaseNotSupported(f"AWQ's layout {version!r:.60} is not supported; use a checkpoint in the layout gemm")
    size = group_size({"group_size": config.get("q_group_size", 128), **config})
    return AwqFormat(size, bool(config.get("zero_point", True)))
