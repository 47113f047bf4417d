"""Alternating updates (Baykal et al., 2023) and learned residuals, as in Gemma 3n.

Each token has several residuals, called streams. A layer predicts its streams from the previous layer's streams,
computes the active stream, and corrects all predictions in proportion to the error of the active stream's prediction.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch.nn import functional

from loramux.engine.architectures.altup_config import PROJECTIONS, UNEMBED_PROJECTIONS, AltUpConfig
from loramux.engine.decoder.placement import Placement
from loramux.kernels.dispatch import Kernels


class AltUp:
    """Makes the streams for the first layer, and joins the last layer's streams."""

    def __init__(self, config: AltUpConfig, hidden_size: int, place: Placement) -> None:
        shapes = dict(config.model_shapes(hidden_size))
        make = place.backend.make_linear
        self._expand, self._join = (
            [
                make(place.tensor(f"{name}.{stream}.weight", shapes[f"{name}.{stream}.weight"]), None)
                for stream in range(config.num_streams - 1)
            ]
            for name in (PROJECTIONS, UNEMBED_PROJECTIONS)
        )

    def expand(self, embedded: torch.Tensor) -> torch.Tensor:
        """Make the streams `[num_streams, num_tokens, hidden_size]` from the embeddings."""
        return torch.stack([embedded, *(_rescaled(linear(embedded), embedded) for linear in self._expand)])

    def join(self, streams: torch.Tensor) -> torch.Tensor:
        """The mean of the first stream and the projections of the other streams, `[num_tokens, hidden_size]`."""
        first, *others = streams
        parts = [_rescaled(linear(other), first) for linear, other in zip(self._join, others, strict=True)]
        return torch.stack([first, *parts]).mean(0)


class AltUpLayer:
    """Predicts and corrects the streams of one layer, and computes its learned residual (laurel)."""

    def __init__(self, config: AltUpConfig, hidden_size: int, place: Placement, prefix: str) -> None:
        shapes = dict(config.layer_shapes(hidden_size))

        def tensor(name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            return place.tensor(f"{prefix}.{name}", shapes[name], dtype)

        self._num_streams = config.num_streams
        self._correction, self._prediction, self._router, self._left, self._right = (
            place.backend.make_linear(tensor(f"{name}.weight"), None)
            for name in (
                "altup.correction_coefs",
                "altup.prediction_coefs",
                "altup.modality_router",
                "laurel.linear_left",
                "laurel.linear_right",
            )
        )
        self._router_norm = place.norm(f"{prefix}.altup.router_norm", hidden_size)
        self._laurel_norm = place.norm(f"{prefix}.laurel.post_laurel_norm", hidden_size)
        self._router_scale = 1 / hidden_size
        scale = tensor("altup.correct_output_scale", place.backend.activation_dtype)
        self._output_scale = scale if config.scales_output else None

    def predict(self, streams: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Predict the streams `[num_streams, num_tokens, hidden_size]`."""
        num = self._num_streams
        mixed = self._prediction(self._modalities(streams[0], kernels)).view(-1, num, num)
        return torch.einsum("sth,tps->pth", streams, mixed) + streams

    def laurel(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """The learned residual, to be added to the output of attention. `x` is the normalised input of attention."""
        return x + self._laurel_norm(kernels, self._right(self._left(x)))

    def correct(self, predicted: torch.Tensor, computed: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Correct the predicted streams. `computed` `[num_tokens, hidden_size]` is the result for the active stream."""
        weights = self._correction(self._modalities(computed, kernels)) + 1.0
        return torch.mul(computed - predicted[0], weights.T[:, :, None]) + predicted

    def gate_input(self, first: torch.Tensor) -> torch.Tensor:
        """The input of `LayerInput`, from the first stream."""
        return first if self._output_scale is None else first * self._output_scale

    def _modalities(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        routed = self._router(self._router_norm(kernels, x) * self._router_scale)
        return torch.tanh(routed.float()).to(x.dtype)


def sparsity_multiplier(sparsity: float) -> float:
    """The quantile of the standard normal distribution at probability `sparsity`."""
    return NormalDist().inv_cdf(sparsity)


def sparse_gate(gate_up: torch.Tensor, multiplier: float) -> torch.Tensor:
    """Replace each row's gate by `max(gate - mean(gate) - multiplier * std(gate), 0)`. The up half is unchanged."""
    gate, up = gate_up.chunk(2, dim=1)
    cutoff = gate.mean(1, keepdim=True) + gate.std(1, keepdim=True, unbiased=False) * multiplier
    return torch.cat((functional.relu(gate - cutoff), up), 1)


def _rescaled(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x` with each row scaled to the root mean square of the same row of `like`."""
    wanted = like.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
