"""Counts the linear layers of a base whose inputs are rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loramux.engine.device.backend import Backend


class ByteInputs:
    """Counts linear layers whose inputs are rounded to 8 bits. The experts of a layer count once per projection."""

    def __init__(self) -> None:
        self.num_layers = 0

    def counted(self, backend: Backend) -> Backend:
        """A copy of a CPU's `backend` that counts the linear layers that it makes."""
        return replace(
            backend,
            make_quantized_linear=self._counted(backend.make_quantized_linear),
            make_quantized_experts=self._counted(backend.make_quantized_experts),
        )

    def _counted(self, make: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if make is None:
            return None

        def count(*arguments: Any) -> Any:
            made = make(*arguments)
            self.num_layers += made is not None and made.x_bits == 8
            return made

        return count
