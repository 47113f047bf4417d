from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

from loramux.adapter_store.tiers.host_slab import ALIGNMENT, HostSlab

SIZE = 64 * ALIGNMENT


@pytest.fixture
def slab() -> HostSlab:
    return HostSlab(np.zeros(SIZE, np.uint8))


def test_a_piece_is_writable_memory_of_its_size(slab: HostSlab) -> None:
    piece = slab.allocate(5000)
    piece[:] = 7
    assert (piece.shape, piece.dtype, int(piece.sum())) == ((5000,), np.uint8, 35000)
    assert slab.num_free_bytes == SIZE - 2 * ALIGNMENT


def test_views_keep_a_piece_alive(slab: HostSlab) -> None:
    """As for an adapter's payload: take a view of a view, then a tensor over it."""
    tensor = torch.from_numpy(slab.allocate(3 * ALIGNMENT).reshape(3, -1)[1:].view(np.int32))
    gc.collect()
    assert slab.num_free_bytes == SIZE - 3 * ALIGNMENT
    del tensor
    gc.collect()
    assert slab.num_free_bytes == SIZE


def test_array_that_does_not_fit_uses_ordinary_memory(slab: HostSlab) -> None:
    large = slab.allocate(SIZE + 1)
    assert (large.shape, slab.num_free_bytes) == ((SIZE + 1,), SIZE)
    whole = slab.allocate(SIZE)
    other = slab.allocate(10)
    other[:] = 1
    assert not whole.any()


def test_random_pieces_never_overlap_and_are_all_freed(slab: HostSlab) -> None:
    rng = random.Random(0)
    held: dict[int, np.ndarray] = {}  # type: ignore[type-arg]
    for number in range(1, 600):
        if held and rng.random() < 0.5:
            key = rng.choice(list(held))
            assert (held.pop(key) == key % 251).all()
        piece = slab.allocate(rng.randint(1, 12 * ALIGNMENT))
        piece[:] = number % 251
        held[number] = piece
        del piece
    for number, piece in held.items():
        assert (piece == number % 251).all()
    held.clear()
    del piece
    gc.collect()
    assert slab.num_free_bytes == SIZE
    assert slab._free == [(0, SIZE)]
