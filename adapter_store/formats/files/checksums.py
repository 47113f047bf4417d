"""Verifies payloads by a checksum that is faster than a SHA-256, which takes longer than reading the file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 1 << 20
"""Number of bytes to check at a time, few enough to still be in the processor's cache after the read."""

NUM_LANES = 1021
"""Number of lanes. It is prime, so the number of words in a disk block or memory page is not a multiple of it.

A block that ends up in the wrong place therefore changes the sums. With more lanes, fewer pairs of flipped bits are
missed, but hashing the sums takes longer.
"""


class LaneSums:
    """A checksum: for each chunk, `NUM_LANES` sums of 64-bit words modulo 2**64, word `i` in lane `i % NUM_LANES`.

    It always detects a change to one word, or to several words in different lanes. It misses moved or lost blocks with
    a probability of about 2**-64. It misses two flipped bits if they are in one lane of one chunk, at the same place in
    their words, and one became 0 and the other 1: about one of 130,000 pairs of random flips in a chunk. It detects
    accidents, not attacks: an attacker who can write the file can also make its checksum match.
    """

    def __init__(self) -> None:
        # Hash all sums in one call at the end, because each hash call releases the GIL and must wait to reacquire it.
        self._parts: list[bytes] = []

    def update(self, chunk: npt.NDArray[np.uint8]) -> None:
        """Add the next chunk, uint8 `[num_bytes]`. Every chunk except the last must be `CHUNK_BYTES` long."""
        num_rows = chunk.nbytes // (8 * NUM_LANES)
        end = num_rows * 8 * NUM_LANES
        sums = np.add.reduce(chunk[:end].view("<u8").reshape(num_rows, NUM_LANES), axis=0, dtype=np.uint64)
        self._parts += (sums.tobytes(), chunk[end:].tobytes())

    def digest(self) -> bytes:
        return hashlib.sha256(b"".join(self._parts)).digest()


def lane_sums(payload: npt.NDArray[np.uint8]) -> str:
    """Return the checksum of a payload, uint8 `[num_bytes]`, in hexadecimal."""
    lanes = LaneSums()
    for begin in range(0, payload.nbytes, CHUNK_BYTES):
        lanes.update(payload[begin : begin + CHUNK_BYTES])
    return lanes.digest().hex()


@dataclass(slots=True)
class PayloadCheck:
    """Checks a payload chunk by chunk while reading it, and records how long that takes."""

    read_s: float = 0.0
    verify_s: float = 0.0

    def run(self, payload: npt.NDArray[np.uint8], checksum: str, read: Callable[[memoryview], int]) -> bool:
        """Fill `payload`, uint8 `[num_bytes]`, from `read` in one pass. Returns whether `checksum` is its `lane_sums`.

        Raises EOFError if the input ends early.
        """
        lanes = LaneSums()
        view = payload.data
        for begin in range(0, payload.nbytes, CHUNK_BYTES):
            started_s = time.perf_counter()
            _fill(view[begin : begin + CHUNK_BYTES], read)
            filled_s = time.perf_counter()
            lanes.update(payload[begin : begin + CHUNK_BYTES])
            self.read_s += filled_s - started_s
            self.verify_s += time.perf_counter() - filled_s
        return lanes.digest().hex() == checksum


def _fill(chunk: memoryview, read: Callable[[memoryview], int]) -> None:
    filled = 0
    while filled < len(chunk):
        num_read = read(chunk[filled:])
        if not num_read:
            raise EOFError
        filled += num_read
