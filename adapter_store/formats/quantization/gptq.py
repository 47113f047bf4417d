"""GPTQ checkpoints with 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization.grids import check_group
from loramux.adapter_store.formats.quantization.packing import pack, words_as_codes
from loramux.adapter_store.formats.quantization.parts import CodedWeight, Parts
from loramux.adapter_store.formats.quantization.reordered import ReorderedWeight, inputs_by_group
from loramux.adapter_store.formats.quantization.weight_format import (
    WeightFormat,
    affine_weight,
    group_size,
    integer,
    matrix_shape,
)


@dataclass(frozen=True, slots=True)
class GptqFormat(WeightFormat):
    """Reads the tensors of GPTQ weights.

    `qweight` is int32 `[in * bits / 32, out]`, `qzeros` int32 `[groups, out * bits / 32]` and `scales` `[groups, out]`.
    `g_idx` int32 `[in]` contains the group of each input. With act-order, the inputs of a group can be
    anywhere in the row. The first version of the format stores each zero point minus 1.
    """

    bits: int
    group: int | None
    zero_offset: int

    suffixes: ClassVar[tuple[str, ...]] = (".qweight", ".qzeros", ".scales", ".g_idx")

    @property
    def name(self) -> str:
        return f"gptq int{self.bits}"

    def is_coded(self, tensors: Mapping[str, MappedTensor]) -> bool:
        return ".qweight" in tensors

    def shape(self, parts: Parts) -> tuple[int, ...]:
        num_words, out_features = matrix_shape(parts, ".qweight", "I32")
        return out_features, num_words * 32 // self.bits

    def read(self, parts: Parts) -> CodedWeight:
        num_words, out_features = matrix_shape(parts, ".qweight", "I32")
        in_features = num_words * 32 // self.bits
        scales = parts.scales(".scales")
        check_group(parts, ".scales", scales.shape[0], in_features, self.group)
        num_groups = scales.shape[0]
        if scales.shape[1:] != (out_features,) or out_features * self.bits % 32:
            raise parts.wrong(".scales", f"has shape {list(scales.shape)} for {out_features} outputs")
        zero_words = parts.array(".qzeros", "I32", (num_groups, out_features * self.bits // 32))
        zeros = words_as_codes(zero_words, self.bits).T + np.uint8(self.zero_offset)
        if self.bits == 4:
            # A stored 15 is -1 modulo 16, and stands for the zero point 0.
            zeros &= 15
        words = parts.tensor(".qweight", "I32").array()
        order = inputs_by_group(parts, ".g_idx", in_features, num_groups)
        if order is None:
            codes = np.ascontiguousarray(words.T).view(np.uint8)
        else:
            codes = words_as_codes(words.T, self.bits)[:, order]
            codes = pack(codes) if self.bits == 4 else codes
        weight = affine_weight(parts, self.bits, codes, np.ascontiguousarray(scales.T), zeros)
        return weight if order is None else ReorderedWeight(weight, order)


def parse_gptq(config: Mapping[str, Any]) -> GptqFormat:
    bits = integer(config, "bits", (4, 8))
    version = str(config.get("checkpoint_format", config.get("format", "gptq"))).lower()
    offsets = {"gptq": 1, "gptq_v2": 0}
    if version not in offsets:
        raise BaseNotSupported(
            f"GPTQ's layout {version!r:.60} is not supported; use a checkpoint in the layout gptq or gptq_v2"
        )
    return GptqFormat(bits, group_size(config), offsets[version])
