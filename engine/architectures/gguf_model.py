"""Finds the model directory of a base, which can also be a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

from loramux.adapter_store.errors import ConversionRefused
from loramux.adapter_store.gguf.base_directory import base_directory, is_gguf
from loramux.engine.protocol.errors import ModelNotSupported


def model_directory(model: Path, root: Path | None = None) -> Path:
    """Return `model` itself, or a directory below `root` that describes `model` if it is a GGUF file.

    By default, `root` is in the user's cache. Raises ModelNotSupported.
    """
    if not is_gguf(model):
        return model
    try:
        return base_directory(model, root or _cache())
    except ConversionRefused as error:
        place = "" if error.param is None or error.param in error.message else f" ({error.param})"
        raise ModelNotSupported(f"{model} is not served: {error.message}{place}") from error


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "loramux" / "gguf"
