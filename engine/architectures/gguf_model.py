"""Finds the model directory of a base, which can also be a GGUF file."""

from __future__ import annotations

import os
import re
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


def check_model_directory(model_dir: Path) -> None:
    """Raise ModelNotSupported unless `model_dir` is a directory with a `config.json`."""
    if not model_dir.exists():
        # The form of a name on a hub.
        is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", str(model_dir)) is not None
        hint = f"; if the model is on a hub, use hf://{model_dir}" if is_name else ""
        raise ModelNotSupported(f"there is no directory {model_dir}{hint}")
    if not model_dir.is_dir():
        use = "use a Hugging Face model directory, or a file whose name ends with .gguf"
        raise ModelNotSupported(f"the model {model_dir} is a file: {use}")
    if (model_dir / "config.json").is_file():
        return
    if (model_dir / "adapter_config.json").is_file():
        use = "it contains an adapter, so start a server with the adapter's base, and push the adapter to it"
    elif (gguf := min(model_dir.glob("*.gguf"), default=None)) is not None:
        use = f"to serve a GGUF model, name its file, {gguf}"
    else:
        use = "use a Hugging Face model directory"
    raise ModelNotSupported(f"{model_dir} has no config.json: {use}")


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "loramux" / "gguf"
