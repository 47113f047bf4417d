from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

DEMO = Path(__file__).parents[2] / "admin" / "demo"


def changed_adapter(directory: Path, factor: float) -> Path:
    """Write the demo's pirate adapter, with its effect scaled by `factor`, to a new directory."""
    shutil.copytree(DEMO / "adapters" / "pirate", directory)
    path = directory / "adapter_model.safetensors"
    tensors: dict[str, Any] = {name: tensor.float() for name, tensor in load_file(path).items()}
    save_file({name: tensor * factor if "lora_B" in name else tensor for name, tensor in tensors.items()}, path)
    return directory
