"""The two files of an adapter, as PEFT writes them."""

from __future__ import annotations

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
UPLOAD_FILES = (CONFIG_FILE, TENSORS_FILE)
"""The names of an upload's two files."""
