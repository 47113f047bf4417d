"""Codebooks of released formats, and random weights of any codebook."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from loramux.kernels.quantized import INT4, INT8, UINT4, UINT8, QuantizedWeight

NF4 = np.array(
    [
        -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""Dettmers et al., "QLoRA", 2023, appendix E."""

MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""E2M1 (Open Compute Project, "OCP Microscaling Formats", 2023)."""

FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()

Shift = Literal["zeros", "minima", "halves"]
"""What a weight has besides scales: zero points, minima, or minima and scales that float16 represents exactly."""

CODEBOOKS: dict[str, tuple[np.ndarray, Shift | None]] = {
    "int8": (INT8, None),
    "uint8-zeros": (UINT8, "zeros"),
    "uint8-minima": (UINT8, "minima"),
    "uint8": (UINT8, None),
    "int4": (INT4, None),
    "uint4-zeros": (UINT4, "zeros"),
    "uint4-minima": (UINT4, "minima"),
    "uint4-halves": (UINT4, "halves"),
    "nf4": (NF4, None),
    "mxfp4": (MXFP4, None),
}
"""The codebooks that a CPU multiplies by without dequantising, and the shifts of their weights."""


def random_weight(
    codebook: np.ndarray, shift: Shift | None, out_features: int, in_features: int, group: int
) -> QuantizedWeight:
    """Random codes and scales from torch's generator of the CPU. The middle of the codebook becomes about 0."""
    shape = (out_features, in_features // group)
    num_codes = in_features * (8 if codebook.size == 256 else 4) // 8
    codes = torch.randint(0, 256, (out_features, num_codes), dtype=torch.uint8, device="cpu").numpy()
    if codebook is FP8:
        codes[codes % 128 == 127] = 0
    zeros = torch.randint(-7, 8, shape, dtype=torch.int16, device="cpu").numpy() + np.int16(np.nanmean(codebook))
    scales = (torch.rand(shape, device="cpu") * 0.01 + 1e-4).numpy()
    minima = -(zeros + torch.rand(shape, device="cpu").numpy()) * scales
    if shift == "halves":
        scales, minima = (values.astype(np.float16).astype(np.float32) for values in (scales, minima))
    return QuantizedWeight(
        codes=codes,
        codebook=codebook,
        scales=scales,
        zeros=zeros if shift == "zeros" else None,
        minima=minima if shift in ("minima", "halves") else None,
    )
