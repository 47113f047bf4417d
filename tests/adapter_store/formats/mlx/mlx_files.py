"""Writes a PEFT adapter as mlx-lm would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.adapter_store.adapter_files import AdapterFiles

_LEAVES = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b", ".lora_magnitude_vector": ".m"}


def write_mlx(directory: Path, files: AdapterFiles, **changes: Any) -> Path:
    """Write the two files into a new directory. `changes` are fields of `lora_parameters`."""
    directory.mkdir()
    tensors = {}
    for name, values in files.tensors.items():
        suffix = next(suffix for suffix in _LEAVES if name.endswith(suffix))
        module = name.removeprefix("base_model.model.").removesuffix(suffix)
        tensors[module + _LEAVES[suffix]] = np.ascontiguousarray(values.T)
    content = save(tensors)
    # mlx-lm's files have this in their headers.
    length = int.from_bytes(content[:8], "little")
    header = b'{"__metadata__":null,' + content[9 : 8 + length].lstrip()
    (directory / "adapters.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    rank = files.config["r"]
    parameters = {"rank": rank, "dropout": 0.0, "scale": files.config["lora_alpha"] / rank, **changes}
    kind = "dora" if files.config.get("use_dora") else "lora"
    config = {"fine_tune_type": kind, "num_layers": 16, "model": "some/base", "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
