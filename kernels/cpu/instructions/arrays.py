"""Tensors in forms that numba accepts: arrays that share the tensors' memory, or addresses and strides."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def array(tensor: torch.Tensor, dtype: torch.dtype) -> npt.NDArray[Any]:
    """A numpy array that shares the tensor's memory, with bfloat16 elements as uint16 bits.

    The tensor must be contiguous and have dtype `dtype`; otherwise numba would recompile a kernel in the middle of a
    step.
    """
    assert tensor.dtype is dtype, f"expected {dtype}, got {tensor.dtype}"
    assert tensor.is_contiguous()
    return (tensor.view(torch.uint16) if dtype is torch.bfloat16 else tensor).numpy()


def rows_of(x: torch.Tensor) -> tuple[int, int]:
    """Address and row stride of an activation `[T, n]` or `[T, heads, head_dim]` whose rows are contiguous."""
    assert x.dtype is torch.float32
    assert x.stride(-1) == 1
    assert x.dim() == 2 or x.stride(1) == x.shape[2]
    return x.data_ptr(), x.stride(0)


def planes_of(planes: torch.Tensor) -> tuple[int, int, int]:
    """Address, row stride and module stride of planes `[T, modules, max_rank]`."""
    assert planes.dtype is torch.float32
    assert planes.stride(2) == 1
    return planes.data_ptr(), planes.stride(0), planes.stride(1)
