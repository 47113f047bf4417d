"""Counts the linear layers of a base that keep their weights quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loramux.engine.device.backend import Backend


class CodeCount:
    """Counts linear layers whose weights stay quantised. The experts of a layer count once per projection."""

    def __init__(self) -> None:
        self.num_kept = 0

    def counted(self, backend: Backend) -> Backend:
        """A copy of `backend` that counts the quantised linear layers that it makes."""
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
            self.num_kept += made is not None
            return made

        return count
