"""The tensors of one quantised weight in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.files.float_formats import STORAGE, to_float32
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization.codebooks import E8M0
from loramux.kernels.quantized import E4M3


class CodedWeight(Protocol):
    """A weight that can be dequantised in blocks of its first axis, such as `kernels.quantized.QuantizedWeight`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dequantize(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one module, by the suffixes of their names. `module` is the common prefix.

    If a tensor is missing or does not fit the format, methods raise BaseNotSupported with the tensor's name.
    """

    module: str
    tensors: Mapping[str, MappedTensor]

    def has(self, suffix: str) -> bool:
        return suffix in self.tensors

    def tensor(self, suffix: str, *dtypes: str) -> MappedTensor:
        if suffix not in self.tensors:
            raise BaseNotSupported(f"the model has no tensor {self.module}{suffix}, which its quantisation needs")
        tensor = self.tensors[suffix]
        if tensor.dtype not in dtypes:
            raise self.wrong(suffix, f"has dtype {tensor.dtype}, not {' or '.join(dtypes)}")
        return tensor

    def array(self, suffix: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        tensor = self.tensor(suffix, dtype)
        if tensor.shape != shape:
            raise self.wrong(suffix, f"has shape {list(tensor.shape)}, not {list(shape)}")
        return tensor.array()

    def floats(self, suffix: str) -> npt.NDArray[np.float32]:
        """Return a tensor's values in float32, without rounding. Values that are not finite raise BaseNotSupported."""
        tensor = self.tensor(suffix, *STORAGE, "F8_E4M3", "F8_E8M0")
        if tensor.dtype == "F8_E4M3":
            values = E4M3.take(tensor.array())
        elif tensor.dtype == "F8_E8M0":
            values = E8M0.take(tensor.array())
        else:
            values = to_float32(tensor.array(), tensor.dtype)
        if not np.isfinite(values).all():
            raise self.wrong(suffix, "contains a value that is not finite")
        return values

    def scales(self, suffix: str) -> npt.NDArray[np.float32]:
        """Return a tensor's scales in float32. A scale of 0 would erase its weights, so it raises BaseNotSupported."""
        values = self.floats(suffix)
        if not values.all():
            raise self.wrong(suffix, "contains a scale of 0")
        return values

    def wrong(self, suffix: str, problem: str) -> BaseNotSupported:
        return BaseNotSupported(f"the tensor {self.module}{suffix} {problem}")
