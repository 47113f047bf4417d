"""The layout of quantised weights on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loramux.kernels.gpu.linear.code_layout import can_place, is_bfloat16, placed_scales, step_of, zero_of
from loramux.kernels.quantized import INT8, CodeKind, QuantizedWeight, code_kind, is_float16, is_same_codebook


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedWeights:
    """The quantised weights of one linear layer, or of the same layer of all experts.

    `codes` uint8 `[num_experts, out_features, bytes]` contains 8-bit codes, or pairs of 4-bit codes. 4-bit codes are
    paired in blocks of `2 * step` inputs: byte `i` of a block has the code of input `i` in its lower four bits, and the
    code of input `step + i` in its upper four bits. The last block is padded with codes of 0.

    Codes of the kind INTEGERS are non-negative integers, with the zero points `zeros` int16 `[num_experts,
    out_features, groups]`, or with the zero point `zero` for all weights. `table` contains the 16 values of the kind
    TABLE. `scales` `[num_experts, out_features, groups]` are float32, or a 16-bit dtype that represents them
    exactly. For the kind E4M3, they include the factor `E4M3_FACTOR`. `minima` have the shape of `scales` and are added
    to the scaled values, or None. `bias` is `[num_experts, out_features]` or None. All tensors are contiguous.
    """

    kind: CodeKind
    bits: int
    in_features: int
    step: int
    codes: torch.Tensor
    scales: torch.Tensor
    zero: int
    zeros: torch.Tensor | None
    minima: torch.Tensor | None
    table: tuple[float, ...] | None
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        return self.codes.shape[1]

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.in_features // self.scales.shape[2]


def place_codes(
    weights: Iterable[QuantizedWeight | torch.Tensor], num_experts: int, bias: torch.Tensor | None, device: torch.device
) -> CodedWeights | None:
    """Lay out one weight for each expert on `device`, or return None if the kernels do not support the weights.

    All weights must be quantised, satisfy `can_place`, and have the same codebook and group size.
    """
    codes, scales, zeros, minima = None, [], [], []
    first: QuantizedWeight | None = None
    for expert, weight in enumerate(weights):
        if not isinstance(weight, QuantizedWeight) or not can_place(weight):
            return None
        if first is None:
            first = weight
        elif weight.group != first.group or not is_same_codebook(weight, first):
            return None
        blocks = _in_blocks(weight)
        if codes is None:
            codes = torch.empty((num_experts, *blocks.shape), dtype=torch.uint8, device=device)
        codes[expert] = torch.from_numpy(blocks)
        scales.append(placed_scales(weight))
        zeros.append(weight.zeros)
        minima.append(weight.minima)
    assert first is not None
    assert codes is not None
    kind = code_kind(first.codebook)
    assert kind is not None
    zero, stacked = zero_of(first), None
    # One launch computes all experts. If only some have zero points, the others get the one that their codes imply.
    if any(one is not None for one in zeros):
        stacked = np.stack([np.full(scales[0].shape, zero, np.int16) if one is None else one + zero for one in zeros])
    stacked_minima = None
    if any(one is not None for one in minima):
        stacked_minima = np.stack([np.zeros_like(scales[0]) if one is None else one for one in minima])
    return CodedWeights(
        kind=kind,
        bits=first.bits,
        in_features=first.in_features,
        step=step_of(first),
        codes=codes,
        scales=_narrowed(np.stack(scales)).to(device),
        zero=zero,
        zeros=None if stacked is None else torch.from_numpy(stacked.astype(np.int16)).to(device),
        minima=None if stacked_minima is None else _narrowed(stacked_minima).to(device),
        table=tuple(first.codebook.tolist()) if kind is CodeKind.TABLE else None,
        bias=bias,
    )


def _in_blocks(weight: QuantizedWeight) -> npt.NDArray[np.uint8]:
    """The codes `[out_features, bytes]` in the order of `CodedWeights`."""
    if weight.bits == 8:
        is_signed = np.array_equal(weight.codebook, INT8)
        # Copy, because torch does not accept read-only arrays, such as mapped files.
        return weight.codes ^ np.uint8(128) if is_signed else weight.codes.copy()
    step = step_of(weight)
    padded = np.pad(weight.codes, ((0, 0), (0, -weight.codes.shape[1] % step)))
    codes = np.empty((len(padded), padded.shape[1] // step, 2 * step), np.uint8)
    pairs = padded.reshape(len(padded), -1, step)
    codes[..., ::2] = pairs & 15
    codes[..., 1::2] = pairs >> 4
    blocks: npt.NDArray[np.uint8] = codes[..., :step] | codes[..., step:] << np.uint8(4)
    return blocks.reshape(len(padded), -1)


def _narrowed(values: npt.NDArray[np.float32]) -> torch.Tensor:
    """The values, in a 16-bit dtype if it represents them exactly."""
    if is_bfloat16(values):
        return torch.from_numpy(values).bfloat16()
    return torch.from_numpy(values.astype(np.float16) if is_float16(values) else values)
