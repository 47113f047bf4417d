"""The pooling of a GGUF embedder, in the files of sentence-transformers.

As in llama.cpp, embeddings have unit length.
"""

from __future__ import annotations

from typing import Any

from loramux.adapter_store.formats.files.file_names import MODULES_FILE
from loramux.adapter_store.gguf.base_metadata import BaseMetadata

_MODES = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
"""llama.cpp's kinds of pooling that are supported, by `pooling_type`. 0 stands for none."""

_FOLDER = "1_Pooling"
_STEPS = {"Transformer": "", "Pooling": _FOLDER, "Normalize": "2_Normalize"}


def pooling_files(metadata: BaseMetadata) -> dict[str, Any]:
    """Return the contents of the files by their paths. Empty if the file names no pooling. Raises ConversionRefused."""
    kind = metadata.find("pooling_type")
    if kind is None or kind == 0:
        return {}
    if type(kind) is not int or kind not in _MODES:
        raise metadata.refused("pooling_type", kind, "one of 0 to 3")
    steps = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in _STEPS.items()]
    return {MODULES_FILE: steps, f"{_FOLDER}/config.json": {f"pooling_mode_{_MODES[kind]}": True}}
