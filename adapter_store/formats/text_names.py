"""The names that a multimodal checkpoint gives to the tensors of its text decoder."""

from __future__ import annotations

_TEXT = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_OTHER_PARTS = tuple(
    level + part for level in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.", "visual.")
)


def text_name(stored: str) -> str | None:
    """The name of the same tensor in a text-only model, or None for a tensor that serves images or video only."""
    if stored.startswith(_OTHER_PARTS):
        return None
    for prefix, replacement in _TEXT:
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored
