"""Verifies payloads: by SHA-256 at the first read, and by a faster checksum (lane sums) at later reads.

Computing a SHA-256 is slower than reading a file. When a process first reads a file, it therefore verifies the SHA-256
and records the lane sums. Later reads compare only the lane sums, as long as the file states the same SHA-256.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 1 << 20
"""Number of bytes to check at a time, few enough to still be in the processor's cache after the read."""

NUM_LANES = 509
"""Number of lanes. It is prime, so the number of words in a disk block or memory page is not a multiple of it.

A block that ends up in the wrong place therefore changes the sums.
"""


class LaneSums:
    """A checksum: for each chunk, `NUM_LANES` sums of 64-bit words modulo 2**64, word `i` in lane `i % NUM_LANES`.

    It always detects a change to one word, or to several words in different lanes. It misses moved or lost blocks with
    a probability of about 2**-64. It detects accidents, not attacks: an attacker who can write the file can also make
    its checksum match.
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


@dataclass(frozen=True, slots=True)
class Proof:
    """The lane sums of a payload, and the SHA-256 that the payload should have."""

    sha256: str
    lane_sums: bytes


@dataclass(slots=True)
class PayloadCheck:
    """Checks a payload chunk by chunk while reading it."""

    proof: Proof | None = None
    """The lane sums from an earlier successful check of this payload, or None.

    Without lane sums for the requested SHA-256, `run` verifies the SHA-256 and stores new lane sums here. Use them only
    if `run` returned True.
    """
    read_s: float = 0.0
    verify_s: float = 0.0

    def run(self, payload: npt.NDArray[np.uint8], sha256: str, read: Callable[[memoryview], int]) -> bool:
        """Fill `payload`, uint8 `[num_bytes]`, from `read` in one pass. Returns whether it matches `sha256`.

        Raises EOFError if the input ends early.
        """
        is_proven = self.proof is not None and self.proof.sha256 == sha256
        hashed, lanes = hashlib.sha256(), LaneSums()
        view = payload.data
        for begin in range(0, payload.nbytes, CHUNK_BYTES):
            chunk = view[begin : begin + CHUNK_BYTES]
            started_s = time.perf_counter()
            _fill(chunk, read)
            filled_s = time.perf_counter()
            lanes.update(payload[begin : begin + CHUNK_BYTES])
            if not is_proven:
                hashed.update(chunk)
            self.read_s += filled_s - started_s
            self.verify_s += time.perf_counter() - filled_s
        found = Proof(sha256, lanes.digest())
        if is_proven:
            return found == self.proof
        self.proof = found
        return hashed.hexdigest() == sha256


def _fill(chunk: memoryview, read: Callable[[memoryview], int]) -> None:
    filled = 0
    while filled < len(chunk):
        num_read = read(chunk[filled:])
        if not num_read:
            raise EOFError
        filled += num_read
