"""Reads the values that a GGUF model's metadata must have, and refuses values that nothing reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loramux.adapter_store.errors import ConversionRefused, printable
from loramux.adapter_store.gguf.gguf_header import GgufTensor

_WITHOUT_EFFECT = frozenset(
    (
        "attention.causal",
        "expert_shared_count",
        "leading_dense_block_count",
        "rope.scaling.finetuned",
        "vocab_size",
    )
)
"""Keys of an architecture that say what the tensors or other keys say too, or that only other programs use."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "use_parallel_residual": (False,),
}
"""Values with which a key that is not read changes nothing."""


class BaseMetadata:
    """The metadata of a GGUF model and its tensors. Keys are relative to the architecture, such as `block_count`.

    A missing, malformed or unsupported value raises ConversionRefused with its key.
    """

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
        self.all = metadata
        self.tensors = tensors
        self._read: set[str] = set()
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise ConversionRefused("invalid_metadata", "the file names no architecture", "general.architecture")
        self.architecture = architecture

    def find(self, key: str) -> Any:
        """Return the value of a key, or None."""
        self._read.add(key)
        return self.all.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a count. An array of equal counts, one for each layer, is one count."""
        value = self.find(key)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if value is None:
            value = default
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self.refused(key, value, "a count")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.find(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.refused(key, value, "a finite number")
        # A float32 such as 1e-5 is read as 9.999999747378752e-06. Fewer digits give the number that was meant.
        return float(f"{value:.7g}")

    def has(self, tensor: str) -> bool:
        """Return whether the file has a tensor, or one like it in the first layer."""
        return tensor in self.tensors or f"blk.0.{tensor}" in self.tensors

    def refused(self, key: str, value: Any, wanted: str) -> ConversionRefused:
        name = f"{self.architecture}.{key}"
        shown = printable(repr(value), 60)
        return ConversionRefused("invalid_metadata", f"{name} is {shown}, not {wanted}", name)

    def check_all_read(self) -> None:
        """Refuse keys of the architecture that nothing has read, because they may change the computation."""
        prefix = f"{self.architecture}."
        for name, value in self.all.items():
            key = name.removeprefix(prefix)
            if not name.startswith(prefix) or key in self._read:
                continue
            if key in _NEUTRAL and value in _NEUTRAL[key]:
                continue
            if key in _NEUTRAL or key not in _WITHOUT_EFFECT:
                shown = printable(repr(value), 60)
                message = f"{printable(name, 100)} = {shown} is not supported for this architecture"
                raise ConversionRefused("unsupported_metadata", message, name)
