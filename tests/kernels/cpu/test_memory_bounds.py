"""No kernel and no program writes outside the memory that it is given."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cpu.every_request import call_every_kernel
from tests.kernels.cpu.guarded_memory import GuardedMemory, guard_allocations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_write_only_to_their_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # If the kernels are not compiled yet, numba must see numpy's own functions.
    call_every_kernel(dtype)
    guarded = guard_allocations(monkeypatch)
    call_every_kernel(dtype)
    guarded.check()


@pytest.mark.parametrize("offset", [-1, 12], ids=["before", "after"])
def test_guards_show_a_write_outside(offset: int) -> None:
    guarded = GuardedMemory()
    tensor = guarded.tensor(torch.zeros(3, 4))
    guarded.check()
    tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)[0] = 1
    with pytest.raises(AssertionError, match="outside 48 bytes"):
        guarded.check()
