"""Memory with guards before and after each array, which show whether a kernel has written outside an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

GUARD_BYTES, GUARD = 4096, 0xA5
"""Size of each guard, and the value of its bytes."""

CONSTRUCTORS = [(torch, name) for name in ("empty", "zeros", "ones", "full")] + [(np, "empty"), (np, "zeros")]


class GuardedMemory:
    """Copies tensors and arrays into memory of their own, between two guards."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        num_bytes = value.numel() * value.itemsize
        # `new_full` is a method, so `guard_allocations` does not replace it.
        memory = torch.tensor([], dtype=torch.uint8).new_full((num_bytes + 2 * GUARD_BYTES,), GUARD)
        self._memory.append(memory)
        found = memory[GUARD_BYTES : GUARD_BYTES + num_bytes].view(value.dtype).view(value.shape)
        return found.copy_(value)

    def array(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        raw = torch.from_numpy(value.reshape(-1).view(np.uint8))
        return self.tensor(raw).numpy().view(value.dtype).reshape(value.shape)

    def check(self) -> None:
        """Fail if anything has written to a guard."""
        assert self._memory
        for memory in self._memory:
            for guard in (memory[:GUARD_BYTES], memory[-GUARD_BYTES:]):
                assert guard.eq(GUARD).all(), f"something has written outside {len(memory) - 2 * GUARD_BYTES} bytes"


def guard_allocations(monkeypatch: pytest.MonkeyPatch) -> GuardedMemory:
    """From now on, allocate all tensors and arrays of these constructors in guarded memory."""
    guarded = GuardedMemory()

    def replacement(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            value = make(*arguments, **options)
            return guarded.tensor(value) if isinstance(value, torch.Tensor) else guarded.array(value)

        return made

    for module, name in CONSTRUCTORS:
        monkeypatch.setattr(module, name, replacement(getattr(module, name)))
    return guarded
