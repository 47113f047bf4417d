"""Reads one worker's share of a model's tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from loramux.adapter_store.formats.quantization.parts import CodedWeight
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import HEAD
from loramux.engine.decoder.weights import Weights
from loramux.engine.parallel.weight_parts import weight_parts
from loramux.kernels.quantized import QuantizedWeight


class ShardedWeights:
    """The tensors of worker `worker` of `size`. Of a float tensor, only the worker's part is read.

    The bias of a layer whose outputs are added up belongs to worker 0, and is zero in other workers. A head that is
    tied to the embedding consists of rows of the embedding. Rows of the head that stand for no token are zero.
    """

    def __init__(self, weights: Weights, model: ModelConfig, size: int, worker: int) -> None:
        self._weights = weights
        # A quantised head is a separate weight, even if the float model's head is tied to the embedding.
        self._is_tied = model.tied_embeddings and not weights.has_quantized_head
        self._parts = weight_parts(model, size, worker, has_own_head=not self._is_tied)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | CodedWeight:
        """The worker's part of a tensor, which has the given shape."""
        part = self._parts.get(name)
        if part is None:
            return self._weights.tensor(name, shape)
        if not part.ranges:
            stored = self._weights.tensor(name, shape)
            assert isinstance(stored, torch.Tensor), "biases are not quantised"
            return torch.zeros_like(stored)
        found = self._weights.part(part.name, part.shape, part.axis, part.ranges)
        if name == HEAD and self._is_tied and not isinstance(found, torch.Tensor):
            # The embedding is dequantised, so that its head is, too.
            found = torch.from_numpy(found.dequantize())
        padded = _padded(found, shape[0])
        assert tuple(padded.shape) == shape
        return padded


def _padded(weight: torch.Tensor | CodedWeight, num_rows: int) -> torch.Tensor | CodedWeight:
    """The weight, followed by rows of zeros up to `num_rows`."""
    num_missing = num_rows - weight.shape[0]
    if not num_missing:
        return weight
    if isinstance(weight, QuantizedWeight):
        # Rows with a scale of 0.
        rows = ((0, num_missing), (0, 0))
        return replace(
            weight,
            codes=np.pad(weight.codes, rows),
            scales=np.pad(weight.scales, rows),
            zeros=None if weight.zeros is None else np.pad(weight.zeros, rows),
            minima=None if weight.minima is None else np.pad(weight.minima, rows),
        )
    floats = weight if isinstance(weight, torch.Tensor) else torch.from_numpy(weight.dequantize())
    return torch.cat([floats, floats.new_zeros(num_missing, *floats.shape[1:])])
