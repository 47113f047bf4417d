"""The random numbers that decide tokens: one counter-based stream for each seed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_NUM_ROUNDS = 10


def philox(counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), a column each.

    `counters` `[4, n]` and `keys` `[2, n]` hold 32-bit words; so does the result `[4, n]`.
    """
    even, odd = counters[0::2], counters[1::2]
    for _ in range(_NUM_ROUNDS):
        products = even * _MULTIPLIERS
        even = (products >> _HALF)[::-1] ^ odd ^ keys
        odd = (products & _WORD)[::-1]
        keys = (keys + _KEY_STEPS) & _WORD
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: Iterable[int], counters: Iterable[int]) -> npt.NDArray[np.float32]:
    """The number in [0, 1) at each place of each stream: 24 bits, as many as a float32 holds.

    A number is computed from its seed, below 2**64, and its place alone, so that neither a neighbour in a batch nor a
    preemption changes it.
    """
    seed = np.array(list(seeds), np.uint64)
    place = np.array(list(counters), np.uint64)
    zero = np.zeros_like(place)
    words = philox(np.stack([place & _WORD, place >> _HALF, zero, zero]), np.stack([seed & _WORD, seed >> _HALF]))
    drawn: npt.NDArray[np.float32] = (words[0] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    return drawn
