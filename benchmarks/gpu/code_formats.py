"""Formats of quantised weights that the GPU benchmark measures and counts, with random codes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.answers import CheckError
from loramux.engine.device.backend import DenseLinear, Linear
from loramux.kernels.gpu.linear.coded_linear import RoundingLinear, make_coded_linear
from loramux.kernels.gpu.linear.coded_weights import place_codes
from loramux.kernels.quantized import E4M3, INT4, INT8, UINT4, QuantizedWeight
from loramux.kernels.routing import ExpertWeights

NF4 = np.array(
    [
        -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ],
    np.float32,
)  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

FP8, FP8_INPUTS = "fp8", "fp8, inputs in fp8"

NUM_DRAWN = (1 << 20) - 3
"""Number of random bytes from which codes are taken. It is prime, so that no two rows of a weight are equal."""


@dataclass(frozen=True, slots=True, eq=False)
class CodeFormat:
    """A format with `group` inputs per scale, or one scale per output if `group` is None. All scales equal `scale`.

    With `rounds_inputs`, linear layers round their inputs to FP8 in large steps, if torch supports this.
    """

    name: str
    codebook: npt.NDArray[np.float32]
    group: int | None
    scale: float
    has_zeros: bool = False
    has_minima: bool = False
    rounds_inputs: bool = False

    def random(self, out_features: int, in_features: int, seed: int = 0) -> QuantizedWeight:
        per_byte = 1 if self.codebook.size == 256 else 2
        # Repeating random codes is faster than drawing all of them.
        drawn = np.random.default_rng(seed).integers(0, 256, NUM_DRAWN, np.uint8)
        codes = np.resize(drawn, (out_features, in_features // per_byte))
        if np.isnan(self.codebook).any():
            codes[codes & 127 == 127] = 0
        scales = np.full((out_features, in_features // (self.group or in_features)), self.scale, np.float32)
        zeros = np.full(scales.shape, 7, np.int16) if self.has_zeros else None
        minima = -8 * scales if self.has_minima else None
        return QuantizedWeight(codes=codes, codebook=self.codebook, scales=scales, zeros=zeros, minima=minima)


FORMATS = {
    form.name: form
    for form in (
        # AWQ and GPTQ store scales in float16. The exponents of mxfp4 fit into bfloat16.
        CodeFormat("int4, groups of 128", UINT4, 128, float(np.float16(0.01)), has_zeros=True),
        CodeFormat("int4, groups of 64", INT4, 64, 0.01),
        # The format of `--quantization int4` and of GGUF's Q4_1.
        CodeFormat("int4, groups of 32, minima", UINT4, 32, float(np.float16(0.01)), has_minima=True),
        CodeFormat("nf4", NF4, 64, 0.1),
        CodeFormat("mxfp4", E2M1, 32, 2.0**-6),
        CodeFormat("int8", INT8, None, 0.001),
        CodeFormat(FP8, E4M3, None, 0.0001),
        CodeFormat("fp8, blocks of 128", E4M3, 128, 0.0001),
        CodeFormat(FP8_INPUTS, E4M3, None, 0.0001, rounds_inputs=True),
        CodeFormat("fp8, blocks of 128, inputs in fp8", E4M3, 128, 0.0001, rounds_inputs=True),
    )
}


class SharedCodes:
    """Makes linear layers and experts whose weights have random codes. Weights of the same shape are shared.

    Linear layers whose number of outputs is in `float_rows`, such as the head and the routers, keep float weights.
    """

    def __init__(self, form: CodeFormat, device: torch.device, float_rows: Collection[int]) -> None:
        self._form, self._device, self._float_rows = form, device, float_rows
        self._linears: dict[tuple[int, ...], Linear] = {}
        self._experts: dict[tuple[int, ...], ExpertWeights] = {}

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        shape = tuple(weight.shape)
        if shape[0] in self._float_rows:
            return DenseLinear(weight, bias)
        if shape not in self._linears:
            weight = self._form.random(*shape)
            linear = make_coded_linear(weight, bias, self._device, rounds_inputs=self._form.rounds_inputs)
            assert linear is not None
            if self._form.rounds_inputs and not isinstance(linear, RoundingLinear):
                raise CheckError("torch cannot multiply these FP8 weights by FP8 inputs here")
            self._linears[shape] = linear
        return self._linears[shape]

    def experts(self, num_experts: int, weights: Iterator[torch.Tensor], bias: torch.Tensor | None) -> ExpertWeights:
        shape = tuple(next(weights).shape)
        if shape not in self._experts:
            weight = self._form.random(*shape)
            experts = place_codes([weight] * num_experts, num_experts, bias, self._device)
            assert experts is not None
            self._experts[shape] = experts
        return self._experts[shape]
