from __future__ import annotations

import numpy as np
import torch

from loramux.engine.device.backend import open_backend
from loramux.engine.loop.loaded_base import CodedLayers
from loramux.kernels.quantized import E4M3, QuantizedWeight


def test_layers_and_experts_without_a_kernel_for_their_codes_are_counted() -> None:
    """No CPU kernel multiplies by FP8 codes. Float weights are offered only for experts, and do not count."""
    layers = CodedLayers()
    backend = layers.counted(open_backend("cpu"))
    assert backend.make_quantized_linear is not None
    assert backend.make_quantized_experts is not None
    codes, scales = np.zeros((32, 64), np.uint8), np.ones((32, 1), np.float32)
    weight = QuantizedWeight(codes=codes, codebook=E4M3, scales=scales)
    assert backend.make_quantized_linear(weight, None) is None
    assert layers.num_dequantized == 1
    assert backend.make_quantized_experts(2, iter([weight, weight]), None) is None
    assert layers.num_dequantized == 2
    assert backend.make_quantized_experts(2, iter([torch.zeros(32, 64)] * 2), None) is None
    assert layers.num_dequantized == 2
