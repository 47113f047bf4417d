"""The names of the tensors of a base's own head for drafts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadNames:
    """A head that drafts the token after the next one, as in DeepSeek-V3 (DeepSeek-AI, 2024, section 2.2).

    For a token with the state `h` in the base, and the embedding `e` of the token after it, the head computes
    `projection([embedding_norm(e), state_norm(h)])`. One decoder layer and `final_norm` follow. The base's own head
    turns the result into logits. The layer has the kind and the tensor names of the base's layers.

    `prefix` precedes the names of all tensors. `{}` stands for the number of the base's layers. With `state_first`, the
    projection reads `h` before `e`. With `reads_normed`, `h` is the output of the base's final norm, and otherwise its
    input.
    """

    prefix: str
    embedding_norm: str
    state_norm: str
    projection: str
    final_norm: str
    state_first: bool = False
    reads_normed: bool = True


MIMO_HEAD = DraftHeadNames(
    prefix="model.mtp_layers.0",
    embedding_norm="token_layernorm",
    state_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    state_first=True,
    reads_normed=False,
)
GLM_HEAD = DraftHeadNames(
    prefix="model.layers.{}",
    embedding_norm="enorm",
    state_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
)
