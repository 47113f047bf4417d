"""What all layers of the decoder read in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from loramux.kernels.tables import AttentionBatch


@dataclass(frozen=True, slots=True, eq=False)
class DecoderStep:
    """One step's inputs and buffers, besides its adapters.

    `activate` is the activation of feed-forward blocks. `angles` contains the cosines and sines of each row's angles,
    for each rotary embedding of the decoder. `query_scale` is a factor for q, or None. `attention` has an entry for
    each of `CacheLayout.groups`. `outputs` maps each `head_dim` to a zeroed buffer `[num_tokens, num_heads, head_dim]`.
    Attention skips padding rows, which belong to no sequence, so they stay zero. `states` lists the pages of the
    sequences' states if layers have a delta rule. `layer_inputs` `[num_tokens, num_layers, size]` are the layers' own
    input embeddings, or None. `delta_inputs` is that of `StepInputs`.
    """

    activate: Callable[[torch.Tensor], torch.Tensor]
    angles: list[tuple[torch.Tensor, torch.Tensor]]
    query_scale: torch.Tensor | None
    attention: Sequence[AttentionBatch]
    outputs: dict[int, torch.Tensor]
    states: AttentionBatch | None
    layer_inputs: torch.Tensor | None
    delta_inputs: list[torch.Tensor] | None
