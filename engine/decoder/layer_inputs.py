"""Embeddings that enter each layer, as in Gemma 3n, in addition to the embedding that enters the first layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from loramux.engine.architectures.model_config import (
    INPUT_EMBEDDING,
    INPUT_PROJECTION_NORM,
    ModelConfig,
    input_shapes,
)
from loramux.engine.decoder.decoder_step import DecoderStep
from loramux.engine.decoder.layer_adapters import AdaptableLinear, LayerAdapters
from loramux.engine.decoder.norms import Norm
from loramux.engine.decoder.placement import Placement
from loramux.engine.device.backend import AddingLinear
from loramux.engine.sequences.layer_groups import LayerGroups
from loramux.kernels.tables import ModuleGroup


class LayerInputs:
    """Computes each layer's additional input from a second embedding of the token and a projection of the first."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        shapes = input_shapes(config)
        self._num_layers, self._size = config.num_layers, config.layer_input_size
        self._embedding = place.tensor(f"{INPUT_EMBEDDING}.weight", shapes[f"{INPUT_EMBEDDING}.weight"])
        self._is_smaller = config.layer_input_vocab_size < config.vocab_size
        # Round the scale to the dtype of the weights before multiplying, as transformers does.
        self._embedding_scale = torch.tensor(self._size**0.5, dtype=place.dtype).item()
        *_, (module,) = config.input_groups
        shape = config.modules[module]
        linear = place.linear("", [shape], has_bias=False)
        adding = linear if isinstance(linear, AddingLinear) else None
        group = ModuleGroup((module,), shape.in_features, (shape.out_features,), (0,))
        self._projection = AdaptableLinear(linear, group, int(LayerGroups.ALL_INPUTS), adding)
        self._projection_scale = config.hidden_size**-0.5
        self._norm = place.norm(INPUT_PROJECTION_NORM, self._size)

    @property
    def embedding_bytes(self) -> int:
        return self._embedding.nbytes

    @property
    def group(self) -> ModuleGroup:
        return self._projection.group

    def __call__(self, tokens: torch.Tensor, embedded: torch.Tensor, adapters: LayerAdapters) -> torch.Tensor:
        """The inputs of all layers, `[num_tokens, num_layers, size]`. `embedded` is `[num_tokens, hidden_size]`, and
        `adapters` are those of the first layer.
        """
        if self._is_smaller:
            tokens = tokens.masked_fill(tokens >= self._embedding.shape[0], 0)
        own = functional.embedding(tokens, self._embedding) * self._embedding_scale
        projected = (self._projection(embedded, adapters) * self._projection_scale).view(
            -1, self._num_layers, self._size
        )
        return (self._norm(adapters.kernels, projected) + own.to(embedded.dtype).view_as(projected)) * 2**-0.5


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """Gates one layer's own input embedding with the layer's output, and projects the product to the hidden size."""

    gate: AdaptableLinear
    projection: AdaptableLinear
    norm: Norm

    @property
    def groups(self) -> tuple[ModuleGroup, ...]:
        return self.gate.group, self.projection.group

    def __call__(self, x: torch.Tensor, step: DecoderStep, adapters: LayerAdapters) -> torch.Tensor:
        """The term to add to the layer's output `x` `[num_tokens, hidden_size]`."""
        assert step.layer_inputs is not None
        gate = functional.gelu(self.gate(x, adapters), approximate="tanh")
        y = self.projection(gate * step.layer_inputs[:, adapters.layer], adapters)
        return self.norm(adapters.kernels, y)
