"""Identifies a base model without reading its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

IDENTIFYING_FILES = ("config.json", "tokenizer.json")


def model_sha256(model_dir: Path) -> str:
    """SHA-256 over the files that must be identical on the gateway and the engine. A missing file counts as empty."""
    total = hashlib.sha256()
    for name in IDENTIFYING_FILES:
        path = model_dir / name
        content = path.read_bytes() if path.is_file() else b""
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()
