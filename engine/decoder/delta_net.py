"""The gated delta rule of one layer, between its input and output projections."""

from __future__ import annotations

import torch
from torch.nn import functional

from loramux.engine.architectures.delta_config import DeltaConfig
from loramux.engine.decoder.decoder_step import DecoderStep
from loramux.engine.decoder.layer_adapters import LayerAdapters
from loramux.engine.decoder.placement import Placement
from loramux.kernels.dispatch import Kernels
from loramux.kernels.tables import AttentionBatch, ModuleGroup


class DeltaNet:
    """The gated delta rule of one layer. `layer` is its index among the layers with a gated delta rule. Each sequence's
    state is stored in pages of the pool.
    """

    def __init__(
        self,
        config: DeltaConfig,
        eps: float,
        place: Placement,
        prefix: str,
        layer: int,
        norm_group: ModuleGroup | None,
    ) -> None:
        self._spec = config.spec
        self._norm_group = norm_group
        self._layer = layer
        self._eps = eps
        shapes = dict(config.weight_shapes())

        def tensor(name: str) -> torch.Tensor:
            name = f"linear_attn.{name}"
            return place.tensor(f"{prefix}.{name}", shapes[name], torch.float32)

        # The kernels read the weights position by position.
        self._weight = tensor("conv1d.weight").squeeze(1).T.contiguous()
        self._rates = torch.stack([-tensor("A_log").exp(), tensor("dt_bias")])
        self._norm_weight = tensor("norm.weight")

    def __call__(self, projected: torch.Tensor, step: DecoderStep, adapters: LayerAdapters) -> torch.Tensor:
        """The input of the output projection. `projected` is the output of the fused input projections."""
        assert step.states is not None
        spec, kernels = self._spec, adapters.kernels
        if step.delta_inputs is not None:
            step.delta_inputs.append(projected)
        y, z = self.advance(projected, step.states, kernels)
        y = kernels.rms_norm(y.view(-1, spec.num_v_heads, spec.v_dim), self._norm_weight, self._eps)
        adapters.replace_norm(y, self._norm_group)
        return (y.view_as(z) * functional.silu(z.float())).to(projected.dtype)

    def advance(
        self, projected: torch.Tensor, batch: AttentionBatch, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the rule, which changes the states of `batch`. Returns its output and the part of `projected` that
        gates the output, `[num_tokens, matrix_rows]` each.
        """
        spec = self._spec
        qkv, z, gates = torch.split(projected, [spec.channels, spec.matrix_rows, 2 * spec.num_v_heads], dim=1)
        mixed = kernels.convolve(qkv, self._weight, self._layer, batch, spec)
        return kernels.delta_rule(mixed, gates, self._rates, self._layer, batch, spec), z
