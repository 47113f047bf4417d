"""Codebooks of released formats, and random weights of any codebook."""

from __future__ import annotations

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

CODEBOOKS = {
    "int8": (INT8, False),
    "uint8-zeros": (UINT8, True),
    "uint8": (UINT8, False),
    "int4": (INT4, False),
    "uint4-zeros": (UINT4, True),
    "nf4": (NF4, False),
    "mxfp4": (MXFP4, False),
}
"""The codebooks that a CPU multiplies by without dequantising, and whether their weights have zero points."""


def random_weight(
    codebook: np.ndarray, has_zeros: bool, out_features: int, in_features: int, group: int
) -> QuantizedWeight:
    """Random codes and scales from torch's generator of the CPU. Zero points are near the middle of the codebook."""
    shape = (out_features, in_features // group)
    num_codes = in_features * (8 if codebook.size == 256 else 4) // 8
    codes = torch.randint(0, 256, (out_features, num_codes), dtype=torch.uint8, device="cpu").numpy()
    if codebook is FP8:
        codes[codes % 128 == 127] = 0
    zeros = torch.randint(-7, 8, shape, dtype=torch.int16, device="cpu").numpy()
    return QuantizedWeight(
        codes=codes,
        codebook=codebook,
        scales=(torch.rand(shape, device="cpu") * 0.01 + 1e-4).numpy(),
        zeros=zeros + np.int16(np.nanmean(codebook)) if has_zeros else None,
    )
