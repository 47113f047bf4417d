"""Products with quantised weights in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from loramux.kernels.quantized import QuantizedWeight


def multiply_codes(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`y = x @ weightᵀ + bias` in float64, with the values of `QuantizedWeight.dequantize`. `x` `[T, in_features]`."""
    y = x.double() @ torch.from_numpy(weight.dequantize()).double().T
    return y if bias is None else y + bias.double()


def round_to_bytes(x: torch.Tensor, block: int) -> torch.Tensor:
    """`x` `[T, in_features]`, rounded to multiples of a scale per block of `block` inputs, in float64.

    The multiples are 8-bit integers. The input with the largest magnitude in a block becomes 127 or -127.
    """
    padded = functional.pad(x, (0, -x.shape[1] % block))
    blocks = padded.view(len(x), padded.shape[1] // block, block)
    largest = blocks.abs().amax(2, keepdim=True)
    # In float64, the product is exact, so it is rounded only once.
    integers = (blocks.double() * (127 / largest.clamp_min(1e-30)).double()).round()
    return (integers * (largest / 127).double()).flatten(1)[:, : x.shape[1]]


def round_to_fp8(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """`x` `[T, in_features]`, rounded to multiples of FP8 (E4M3) numbers, in float64.

    Each of `num_groups` equal parts of a row has a scale, with which its largest magnitude becomes 448.
    """
    parts = x.double().unflatten(1, (num_groups, -1))
    scales = (parts.abs().amax(2, keepdim=True).float() / 448).clamp_min(2.0**-100)
    codes = (parts.float() / scales).to(torch.float8_e4m3fn)
    return (codes.double() * scales.double()).flatten(1)
