"""Writes a safetensors file of float32 tensors one at a time, so memory use is bounded by the largest tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 8


def write_tensors(
    destination: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str], npt.NDArray[np.float32]],
) -> None:
    """Write the tensors in the order of `shapes`. `tensor` is called with a tensor's name just before it is written."""
    document: dict[str, object] = {}
    position = 0
    for name, shape in shapes.items():
        end = position + math.prod(shape) * 4
        document[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(document, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with destination.open("wb") as out:
        out.write(len(header).to_bytes(8, "little"))
        out.write(header)
        for name, shape in shapes.items():
            made = np.ascontiguousarray(tensor(name), dtype="<f4")
            assert made.shape == shape
            out.write(made.data)
