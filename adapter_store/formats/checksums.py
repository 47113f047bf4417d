"""Whether a payload in memory is what its file's writer meant: SHA-256 at first use, then a checksum as fast as memory.

SHA-256 costs more than reading. So the first read of a file by a run verifies it whole and notes lane sums of the same
bytes; later reads, as long as the file claims the same SHA-256, must give the same lane sums.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 1 << 20
"""What is checked at a time: it is still in the processor's cache, for it has just been read."""

NUM_LANES = 509
"""A prime, so that no block of a disk or page of memory is a whole number of rows, and its place counts."""


class LaneSums:
    """A checksum: of each chunk, `NUM_LANES` sums of 64-bit words modulo 2**64, word `i` in lane `i % NUM_LANES`.

    It changes for certain when one word does, or some of different lanes do, and by all but a chance of about 2**-64
    when blocks change places or are lost. It withstands accidents, not an attacker who is free to write the file, and
    who could write one that is right in itself just as well.
    """

    def __init__(self) -> None:
        # Hashed together at the end: hashing anything gives the interpreter's lock away and has to wait for it.
        self._parts: list[bytes] = []

    def update(self, chunk: npt.NDArray[np.uint8]) -> None:
        """Take the next chunk, uint8 `[num_bytes]`; all but the last are of `CHUNK_BYTES`."""
        num_rows = chunk.nbytes // (8 * NUM_LANES)
        end = num_rows * 8 * NUM_LANES
        sums = np.add.reduce(chunk[:end].view("<u8").reshape(num_rows, NUM_LANES), axis=0, dtype=np.uint64)
        self._parts += (sums.tobytes(), chunk[end:].tobytes())

    def digest(self) -> bytes:
        return hashlib.sha256(b"".join(self._parts)).digest()


@dataclass(frozen=True, slots=True)
class Proof:
    """Lane sums of a payload whose SHA-256 was verified."""

    sha256: str
    lane_sums: bytes


@dataclass(slots=True)
class PayloadCheck:
    """Reads a payload chunk by chunk and checks it on the way."""

    proof: Proof | None = None
    """What an earlier check of the same payload found, and then what this one does; None verifies its SHA-256."""
    read_s: float = 0.0
    verify_s: float = 0.0

    def run(self, payload: npt.NDArray[np.uint8], sha256: str, read: Callable[[memoryview], int]) -> bool:
        """Fill `payload`, uint8 `[num_bytes]`, from `read` in one pass; whether it is the one that has this SHA-256.

        Raises EOFError where it ends too early.
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
