"""Data-sheet figures for a few cards, for estimates that are computed without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

WARP_THREADS = 32
REGISTERS = 65536
"""Registers per multiprocessor, on every card in CARDS."""

REGISTER_UNIT = 256
"""Registers are allocated to warps in multiples of this number."""

RESERVED_SHARED = 1024
"""Bytes of shared memory that CUDA reserves for each program (thread block)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card, from its vendor's data sheet and the table of compute capabilities in the CUDA programming guide.

    `capability` is the compute capability to compile for, such as 90 for 9.0. `bandwidth` is in bytes per second, and
    `shared_bytes` is the shared memory of a multiprocessor. `node_s` is the time that each kernel adds to a captured
    graph. It is an assumption until measured. Graphs typically add 1.5 to 2.5 microseconds per node.
    """

    name: str
    capability: int
    bandwidth: float
    multiprocessors: int
    shared_bytes: int
    max_warps: int
    max_programs: int
    node_s: float = 2e-6

    def resident_programs(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """Number of programs of this size that fit on one multiprocessor. `registers` is per thread."""
        per_warp = -(-registers * WARP_THREADS // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS // per_warp // num_warps if registers else self.max_programs
        by_shared = self.shared_bytes // (shared_bytes + RESERVED_SHARED)
        return min(self.max_programs, self.max_warps // num_warps, by_registers, by_shared)


def _card(
    name: str, capability: int, bandwidth: float, multiprocessors: int, shared_kib: int = 100, max_warps: int = 48
) -> Card:
    """A card with half as many resident programs as warps. The defaults are those of Ada and later consumer cards."""
    return Card(
        name=name,
        capability=capability,
        bandwidth=bandwidth,
        multiprocessors=multiprocessors,
        shared_bytes=shared_kib << 10,
        max_warps=max_warps,
        max_programs=max_warps // 2,
    )


CARDS = {
    "a100": _card("A100 80 GB SXM", 80, 2.039e12, 108, 164, 64),
    "h100": _card("H100 80 GB SXM", 90, 3.35e12, 132, 228, 64),
    "h200": _card("H200 141 GB SXM", 90, 4.8e12, 132, 228, 64),
    "b200": _card("B200 SXM", 100, 8.0e12, 148, 228, 64),
    "l4": _card("L4", 89, 0.3e12, 58),
    "4090": _card("GeForce RTX 4090", 89, 1.008e12, 128),
    "5090": _card("GeForce RTX 5090", 120, 1.792e12, 170),
}


@dataclass(frozen=True, slots=True)
class PlannedCard:
    """A card for a dry run, with its memory in bytes and its dense bfloat16 operations/s, from its data sheet."""

    card: Card
    memory_bytes: int
    matmul: float


PLANNED = {
    "h100": PlannedCard(CARDS["h100"], 80 * 10**9, 989e12),
    "h200": PlannedCard(CARDS["h200"], 141 * 10**9, 989e12),
}
"""The cards that `benchmarks.gpu --dry-run` supports."""
