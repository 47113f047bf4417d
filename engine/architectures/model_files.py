"""Identifies a base model by its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from loramux.adapter_store.errors import AdapterUnavailable
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.engine.protocol.errors import ConfigNotUsable

IDENTIFYING_FILES = ("config.json", "tokenizer.json")


def model_sha256(model_dir: Path) -> str:
    """SHA-256 over the files that must be identical on the gateway and the engine. A missing file counts as empty."""
    total = hashlib.sha256()
    for name in IDENTIFYING_FILES:
        path = model_dir / name
        content = path.read_bytes() if path.is_file() else b""
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()


def base_sha256(model_dir: Path) -> str:
    """Identifies the base: SHA-256 over the files of `model_sha256` and a sample of the stored weights.

    An adapter that is valid for one base can be wrong for another, even if all shapes are equal. Raises
    ConfigNotUsable if the weights cannot be read.
    """
    try:
        weights = BaseWeights(model_dir).fingerprint
    except AdapterUnavailable as error:
        raise ConfigNotUsable(f"the weights in {model_dir} cannot be read: {error.__cause__}") from error
    parts = f"{model_sha256(model_dir)} {weights}"
    return hashlib.sha256(parts.encode()).hexdigest()
