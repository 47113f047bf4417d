"""Moves a model's tensors to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from loramux.adapter_store.formats.quantization.parts import CodedWeight
from loramux.adapter_store.formats.quantization.reordered import ReorderedWeight
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.decoder.norms import LayerNorm, Norm, RmsNorm
from loramux.engine.decoder.weights import WeightSource
from loramux.engine.device.backend import Backend, Linear, MakeQuantizedLinear
from loramux.engine.device.worker_group import WorkerGroup
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.kernels.composed_linear import JoinedLinear, ReorderedLinear
from loramux.kernels.layout import LinearShape
from loramux.kernels.quantized import QuantizedWeight, concatenate
from loramux.kernels.routing import ExpertWeights

_BLOCK_ELEMENTS = 1 << 22
"""Number of elements of a quantised weight to dequantise at a time."""


ExpertWeight = torch.Tensor | QuantizedWeight


class DividedHead:
    """A head of `vocab_size` tokens. This worker computes the outputs of `share`, and joins them with the others'."""

    def __init__(self, share: Linear, workers: WorkerGroup, vocab_size: int) -> None:
        self._share = share
        self._workers = workers
        self._vocab_size = vocab_size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # The last rows may stand for no token.
        return self._workers.join_columns(self._share(x))[:, : self._vocab_size]


@dataclass(frozen=True, slots=True)
class Placement:
    """Moves tensors to the device: linear layers in the weights' dtype, RMS norms in float32, and layer norms in the
    dtype of the activations.

    Some architectures store norm weights minus 1. The 1 is added here, so that kernels need no special case.
    """

    weights: WeightSource
    dtype: torch.dtype
    backend: Backend
    config: ModelConfig

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Move a tensor to the device, in `dtype` or, if None, the weights' dtype. A quantised tensor is
        dequantised.
        """
        stored = self.weights.tensor(name, shape)
        placed = self._placed(stored, dtype or self.dtype)
        # A tensor that shares the memory mapping of its file would keep the whole file mapped.
        return placed.clone() if placed is stored else placed

    def norm(self, name: str, size: int) -> Norm:
        config = self.config
        if config.has_norm_weights:
            weight = self.tensor(f"{name}.weight", (size,), torch.float32)
        else:
            weight = torch.ones(size, device=self.backend.device)
        if config.norm_offset:
            weight = weight + config.norm_offset
        if not config.has_layer_norms:
            return RmsNorm(weight, config.norm_eps)
        dtype = self.backend.activation_dtype or self.dtype
        bias = self.tensor(f"{name}.bias", (size,), dtype) if config.has_norm_biases else None
        return LayerNorm(weight.to(dtype), bias, config.norm_eps)

    def finite(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor in float32. Raises ModelNotSupported if an element is NaN or infinite."""
        tensor = self.tensor(name, shape, torch.float32)
        if not tensor.isfinite().all():
            raise ModelNotSupported(f"the tensor {name} contains NaN or infinity")
        return tensor

    def linear(self, prefix: str, shapes: Iterable[LinearShape], has_bias: bool) -> Linear:
        """Fuse linear layers that share an input into one that concatenates their outputs.

        Their names are relative to `prefix`, which can be empty.
        """
        shapes = list(shapes)
        bias = None
        if has_bias:
            bias = torch.cat(
                [self.tensor(f"{prefix}.{one.name}.bias".removeprefix("."), (one.out_features,)) for one in shapes]
            )
        stored = self._stored(prefix, shapes)
        make = self.backend.make_quantized_linear
        linear = None if make is None else self._linear_of_codes(stored, bias, make)
        return linear or self.backend.make_linear(self._floats(stored), bias)

    def head(self, shape: LinearShape, has_bias: bool) -> Linear:
        """The head, which all workers divide among themselves."""
        workers = self.backend.workers
        if workers is None:
            return self.linear("", [shape], has_bias)
        share = replace(shape, out_features=-(-shape.out_features // workers.size))
        return DividedHead(self.linear("", [share], has_bias), workers, shape.out_features)

    def experts(
        self, num_experts: int, weights: Callable[[], Iterator[ExpertWeight]], bias: torch.Tensor | None
    ) -> ExpertWeights:
        """Lay out one linear layer of all experts, keeping the weights quantised if possible.

        `weights` may be called twice. Each call yields the weights of all experts in order.
        """
        make = self.backend.make_quantized_experts
        found = None if make is None else make(num_experts, weights(), bias)
        if found is not None:
            return found
        return self.backend.make_experts(num_experts, (self._placed(one, self.dtype) for one in weights()), bias)

    def fused_weight(self, prefix: str, shapes: Sequence[LinearShape]) -> ExpertWeight:
        """The concatenated weights of linear layers that share an input. They stay quantised if `concatenate` supports
        their formats, and are otherwise dequantised.
        """
        stored = self._stored(prefix, shapes)
        codes = [part for part in stored if isinstance(part, QuantizedWeight)]
        fused = concatenate(codes) if len(codes) == len(stored) else None
        return self._floats(stored) if fused is None else fused

    def _linear_of_codes(
        self, stored: list[torch.Tensor | CodedWeight], bias: torch.Tensor | None, make: MakeQuantizedLinear
    ) -> Linear | None:
        """A linear layer with quantised weights, or None if one is not quantised or no kernel supports it."""
        reordered = [part for part in stored if isinstance(part, ReorderedWeight)]
        if reordered and any(not np.array_equal(part.inputs, reordered[0].inputs) for part in reordered):
            return None
        is_reordered = len(reordered) == len(stored)
        codes = [part.by_group for part in reordered] if is_reordered else []
        codes += [part for part in stored if isinstance(part, QuantizedWeight)]
        if len(codes) != len(stored):
            return None
        weight = concatenate(codes)
        linear = _joined(codes, bias, make) if weight is None else make(weight, bias)
        if linear is None or not is_reordered:
            return linear
        return ReorderedLinear(linear, torch.from_numpy(reordered[0].inputs).to(self.backend.device))

    def _stored(self, prefix: str, shapes: Sequence[LinearShape]) -> list[torch.Tensor | CodedWeight]:
        names = [f"{prefix}.{one.name}.weight".removeprefix(".") for one in shapes]
        return [
            self.weights.tensor(name, (one.out_features, one.in_features))
            for name, one in zip(names, shapes, strict=True)
        ]

    def _floats(self, stored: list[torch.Tensor | CodedWeight]) -> torch.Tensor:
        parts = [self._placed(one, self.dtype) for one in stored]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _placed(self, stored: torch.Tensor | CodedWeight, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(stored, torch.Tensor):
            return stored.to(self.backend.device, dtype)
        placed = torch.empty(stored.shape, dtype=dtype, device=self.backend.device)
        # Dequantise in blocks, so that only a few rows are in memory in float32.
        num_rows = max(1, _BLOCK_ELEMENTS // placed[0].numel())
        for begin in range(0, placed.shape[0], num_rows):
            placed[begin : begin + num_rows] = torch.from_numpy(stored.dequantize(begin, begin + num_rows))
        return placed


def _joined(codes: Sequence[QuantizedWeight], bias: torch.Tensor | None, make: MakeQuantizedLinear) -> Linear | None:
    """A linear layer of weights in different formats, or None if no kernel supports one of them."""
    linears: list[Linear] = []
    begin = 0
    for weight in codes:
        end = begin + weight.out_features
        linear = make(weight, None if bias is None else bias[begin:end])
        if linear is None:
            return None
        linears.append(linear)
        begin = end
    return JoinedLinear(linears)
