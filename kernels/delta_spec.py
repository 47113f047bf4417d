"""The sizes of a model's gated delta rule and the layout of a sequence's state. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.kernels.layout import PageGeometry

STATE_ITEMSIZE = 4
"""Size in bytes of an element of a state. States are always float32; the pool's dtype does not matter."""


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """The layers with a gated delta rule, which all have the same sizes, and the state that they keep for each
    sequence.

    A layer convolves each of its channels (q, k, then v) over `conv_len` positions. Each of the `num_v_heads` value
    heads has a matrix `[v_dim, k_dim]`. Consecutive value heads share a key head.

    The state of a sequence consists of float32 rows of `k_dim` elements, layer by layer: first the matrices, then the
    tail of the convolution, which is its last `conv_len - 1` inputs, oldest first. Each input begins a new row. The
    rows fill pages of their own, `total_page_bytes` each; a row never crosses a page boundary.
    """

    num_layers: int
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_len: int

    @property
    def channels(self) -> int:
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def matrix_rows(self) -> int:
        """Number of rows of a layer's matrices."""
        return self.num_v_heads * self.v_dim

    @property
    def input_rows(self) -> int:
        """Number of rows of one input of the convolution."""
        return -(-self.channels // self.k_dim)

    @property
    def layer_rows(self) -> int:
        return self.matrix_rows + (self.conv_len - 1) * self.input_rows

    def rows_per_page(self, geometry: PageGeometry) -> int:
        return geometry.total_page_bytes // (STATE_ITEMSIZE * self.k_dim)

    def num_pages(self, geometry: PageGeometry) -> int:
        """Number of pages of one sequence's state. Raises ValueError if a row does not fit into a page."""
        rows = self.rows_per_page(geometry)
        if rows < 1:
            raise ValueError(
                f"a page of {geometry.total_page_bytes} bytes cannot hold {self.k_dim} elements of a state"
            )
        return -(-self.num_layers * self.layer_rows // rows)
