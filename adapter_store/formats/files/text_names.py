"""The names that checkpoints give to the tensors and modules of a text decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

_TEXT = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
)
_BARE = ("embed_tokens.", "final_layernorm.", "layers.", "norm.")
"""The beginnings of names without `model.`, in checkpoints of a decoder without a head, such as those of embedders."""
_DRAFTS = "mtp"
"""The part with layers for multi-token prediction. The model's ordinary output does not depend on them."""
DRAFT_LAYERS = "mtp_layers"
"""The same part of the decoder of MiMo, which a server may read to draft tokens. Adapters can change it."""
_OTHER_PARTS = frozenset(
    {
        "aligner",
        "audio_tower",
        "connector",
        "embed_audio",
        "embed_vision",
        "image_newline",
        "image_tower",
        "multi_modal_projector",
        "projector",
        "video_tower",
        "vision_embedder",
        "vision_encoder",
        "vision_model",
        "vision_projection",
        "vision_projector",
        "vision_tower",
        "visual",
        "visual_embeddings_table",
    }
)
"""The parts of a multimodal model beside its text decoder, by their names at the top or in `model`."""


def is_other_part(module: str) -> bool:
    """Return whether a module, given by its name or by the end of its name, is outside the text decoder."""
    return not (_OTHER_PARTS | {_DRAFTS, DRAFT_LAYERS}).isdisjoint(module.split("."))


def text_name(stored: str) -> str | None:
    """Return the tensor's name in a text-only model, or None if a text-only model does not need the tensor."""
    if stored.startswith(f"{_DRAFTS}.") or stored.removeprefix("model.").partition(".")[0] in _OTHER_PARTS:
        return None
    for prefix, replacement in _TEXT:
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored


def with_prefix(tensors: Mapping[str, T]) -> dict[str, T]:
    """Put `model.` before the names of the decoder's tensors, by name, if no tensor has this prefix."""
    if any(name.startswith("model.") for name in tensors):
        return dict(tensors)
    return {f"model.{name}" if name.startswith(_BARE) else name: tensor for name, tensor in tensors.items()}


def text_module(name: str) -> str:
    """Return the module's name, or the end of its name, in a text-only model.

    Removes the part that names the text decoder, for example from `model.language_model.layers.0.mlp.up_proj`
    (transformers 5), `language_model.model.layers.0.mlp.up_proj` and `language_model.lm_head` (earlier versions), and
    `model.text_model.layers.0.mlp.up_proj`.
    """
    for part in ("language_model.", "text_model."):
        inner = f"model.{part}"
        if name.startswith(inner):
            return "model." + name.removeprefix(inner)
        if name.startswith(part):
            return name.removeprefix(part)
    return name
