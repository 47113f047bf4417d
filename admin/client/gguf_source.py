"""Converts a llama.cpp adapter for a push or a check. Servers read only PEFT files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.adapter_store.errors import ConversionRefused
from loramux.adapter_store.gguf.conversion import convert_gguf
from loramux.admin.client.push import Progress
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.protocol.errors import ModelNotSupported

NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}
"""llama.cpp's name for each architecture whose adapters can be converted."""


@contextmanager
def converted_gguf(
    path: Path, base: Path | None, progress: Progress = lambda _what, _num_bytes: None
) -> Iterator[Path]:
    """Yield a temporary directory with the converted adapter. `base` is the base model's directory or GGUF file, if it
    is known.

    Raises ConversionRefused.
    """
    model = None
    if base is not None:
        try:
            model = ModelConfig.load(model_directory(base))
        except ModelNotSupported as error:
            raise ConversionRefused("base_mismatch", str(error), "config.json") from None
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        head_dim = None if model is None else model.attention.head_dim
        architecture = convert_gguf(path, directory, head_dim, lambda num_bytes: progress("convert", num_bytes))
        if model is not None and NAMES.get(model.architecture) != architecture:
            message = f"the adapter is for {architecture}, but the base is a {model.architecture}"
            raise ConversionRefused("base_mismatch", message, "general.architecture")
        yield directory
