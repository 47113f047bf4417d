"""The parallel streams, learned residuals and sparse activations of Gemma 3n."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loramux.engine.architectures.config_fields import not_negative, positive, refuse_field, shown
from loramux.engine.protocol.errors import ModelNotSupported

MAX_STREAMS = 16

PROJECTIONS, UNEMBED_PROJECTIONS = "model.altup_projections", "model.altup_unembed_projections"


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """The settings of `AltUp`. A token has `num_streams` residuals, called streams, and each layer computes the stream
    at index `active`.

    The learned residual of each layer has rank `laurel_rank`. `sparsities` contains, for each layer, the approximate
    share of the gate's features that become 0. With `scales_output`, a tensor scales the input of `LayerInput`.
    """

    num_streams: int
    active: int
    scales_output: bool
    laurel_rank: int
    sparsities: tuple[float, ...]

    def model_shapes(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name and the shape of each tensor outside the layers."""
        for name in (PROJECTIONS, UNEMBED_PROJECTIONS):
            for stream in range(self.num_streams - 1):
                yield f"{name}.{stream}.weight", (hidden_size, hidden_size)

    def layer_shapes(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name, without the layer's prefix, and the shape of each tensor of a layer."""
        num = self.num_streams
        yield "altup.correct_output_scale", (hidden_size,)
        yield "altup.correction_coefs.weight", (num, num)
        yield "altup.prediction_coefs.weight", (num * num, num)
        yield "altup.modality_router.weight", (num, hidden_size)
        yield "altup.router_norm.weight", (hidden_size,)
        yield "laurel.linear_left.weight", (self.laurel_rank, hidden_size)
        yield "laurel.linear_right.weight", (hidden_size, self.laurel_rank)
        yield "laurel.post_laurel_norm.weight", (hidden_size,)


def parse_altup(raw: Mapping[str, Any], architecture: str, num_layers: int) -> AltUpConfig:
    """Read the settings from `config.json`. Raises ModelNotSupported."""
    num_streams, active = positive(raw, "altup_num_inputs"), not_negative(raw, "altup_active_idx")
    if num_streams > MAX_STREAMS or active >= num_streams:
        raise ModelNotSupported(
            f"altup_num_inputs {num_streams} with altup_active_idx {active} in config.json is not supported"
        )
    if active != 0:
        refuse_field("altup_active_idx", active, architecture)
    sparsities = raw["activation_sparsity_pattern"]
    if sparsities is None:
        num_sparse = 10 if num_layers > 10 else 0
        sparsities = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    if len(sparsities) != num_layers or any(type(one) not in (int, float) or not 0 <= one < 1 for one in sparsities):
        raise ModelNotSupported(
            f"activation_sparsity_pattern = {shown(sparsities)} in config.json does not list a share in [0, 1) for "
            f"each of {num_layers} layers"
        )
    return AltUpConfig(
        num_streams=num_streams,
        active=active,
        scales_output=bool(raw["altup_correct_scale"]),
        laurel_rank=positive(raw, "laurel_rank"),
        sparsities=tuple(map(float, sparsities)),
    )
