"""The interface of a quantised checkpoint's format, and the checks that all formats share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization.parts import CodedWeight, Parts
from loramux.kernels.quantized import INT4, INT8, UINT4, UINT8, QuantizedWeight


@runtime_checkable
class WeightFormat(Protocol):
    """Reads the quantised weights of one checkpoint.

    The methods raise BaseNotSupported for a weight that does not fit the format. `suffixes` are the suffixes of all
    tensors of a weight, including ignored ones.
    """

    __slots__ = ()

    suffixes: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str:
        """The format's name in messages to operators, such as `awq int4`."""
        ...

    def is_coded(self, tensors: Mapping[str, MappedTensor]) -> bool:
        """Return whether a module's tensors, by suffix, form a quantised weight. If not, they are ordinary tensors."""
        ...

    def weight_name(self, module: str) -> str:
        """Return the weight's name in a checkpoint that is not quantised."""
        return f"{module}.weight"

    def shape(self, parts: Parts) -> tuple[int, ...]: ...

    def read(self, parts: Parts) -> CodedWeight: ...


def matrix_shape(parts: Parts, suffix: str, *dtypes: str) -> tuple[int, int]:
    shape = parts.tensor(suffix, *dtypes).shape
    if len(shape) != 2 or not all(shape):
        raise parts.wrong(suffix, f"has shape {list(shape)}, but must be a matrix")
    return shape[0], shape[1]


def affine_weight(
    parts: Parts,
    bits: int,
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    zero_codes: npt.NDArray[np.uint8] | None,
    minima: npt.NDArray[np.float32] | None = None,
) -> QuantizedWeight:
    """Return the weight `(code - zero) * scale`, or `code * scale + minimum`, for unsigned codes.

    4-bit codes are packed, two in a byte. Without zero points and minima, `zero` is the middle code, 8 or 128.
    """
    if minima is not None:
        codebook = UINT4 if bits == 4 else UINT8
        return QuantizedWeight(codes=codes, codebook=codebook, scales=scales, minima=minima)
    middle = 8 if bits == 4 else 128
    if zero_codes is not None and not (zero_codes == middle).all():
        zeros = np.ascontiguousarray(zero_codes, np.int16)
        return QuantizedWeight(codes=codes, codebook=UINT4 if bits == 4 else UINT8, scales=scales, zeros=zeros)
    if bits == 4:
        return QuantizedWeight(codes=codes, codebook=INT4, scales=scales)
    return QuantizedWeight(codes=flip_sign(codes), codebook=INT8, scales=scales)


def flip_sign(codes: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Convert the bytes of int8 values to uint8 values that are 128 higher, or back."""
    return codes ^ np.uint8(128)


def integer(config: Mapping[str, Any], name: str, allowed: tuple[int, ...]) -> int:
    value = config.get(name)
    if type(value) is not int or value not in allowed:
        choices = " or ".join(map(str, allowed))
        raise BaseNotSupported(f"quantization_config.{name} is {value!r:.60}; {choices} can be read")
    return value


def group_size(config: Mapping[str, Any]) -> int | None:
    """Return `group_size`, or None if a group covers all inputs."""
    value = config.get("group_size")
    if value in (None, -1):
        return None
    if type(value) is not int or value < 1:
        raise BaseNotSupported(f"quantization_config.group_size is {value!r:.60}, not -1 or a positive number")
    return value
