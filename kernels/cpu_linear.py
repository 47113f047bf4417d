"""A linear layer whose weight is laid out for the CPU's matrix multiplication."""

from __future__ import annotations

import torch
from torch.nn import functional

ROWS_HINT = 16
"""The number of rows that the layout is chosen for: a full decode batch, the most frequent step."""

SMALL_WEIGHT = 1 << 17
"""Elements below which oneDNN's cost of a call exceeds what its layout saves."""


class PackedLinear:
    """`y = x @ weightᵀ + bias` for float32 `x` `[T, in_features]`.

    The weight `[out_features, in_features]` is kept once, in the fastest form that this CPU has: a bfloat16 weight as
    oneDNN's blocked bfloat16 where the CPU multiplies that, every other one as oneDNN's blocked float32, and as plain
    float32 where it is small or torch was built without oneDNN. The bits of a row may depend on the number of rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._is_packed = torch.backends.mkldnn.is_available() and weight.numel() >= SMALL_WEIGHT
        is_bfloat16 = (
            self._is_packed and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        self._dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        self._bias = None if bias is None else bias.detach().to(self._dtype)
        self._weight = weight.detach().to(self._dtype).contiguous()
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, ROWS_HINT)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._dtype is torch.bfloat16:
            return self._multiply(x.to(torch.bfloat16)).float()
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return functional.linear(x, self._weight, self._bias)
