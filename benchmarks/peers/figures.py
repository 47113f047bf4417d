"""Computes tokens per second, ratios to the best peer, and overheads, with their targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.peers.system import LORAMUX, System
from benchmarks.peers.workload import ATTENTION, BASE, DISTINCT, SAME, Load

OVER_PEERS = {BASE: 1.0, DISTINCT: 2.6, SAME: 1.2}
"""Target for throughput relative to the best peer, at any load, by kind of work."""

OVERHEAD = {Load(64, 32): 0.15, Load(32, 128): 0.22}
"""Target for the overhead of adapters on all seven linear layers relative to the base only, by load."""

ATTENTION_OVERHEAD = 0.10
"""Target for the overhead of adapters on q, k, v and o, at the same loads."""


@dataclass(frozen=True, slots=True)
class Goals:
    """Targets for throughput relative to the best peer, by kind of work, and for the overhead of adapters on all seven
    linear layers, by load.
    """

    over_peers: Mapping[str, float]
    overhead: Mapping[Load, float]


FLOAT_GOALS = Goals(OVER_PEERS, OVERHEAD)

NEAR = 0.7
"""A cell (system, load and kind of work) below this share of the best speed is not measured again, because drift cannot
make it the best.
"""


HOPELESS = 0.35
"""A dtype that reaches less than this share of the peer's best speed is not tried further. The CPU probably emulates
it.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    system: System
    load: Load
    kind: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure with its target. `against` names the denominator. `value` is None if it was not measured."""

    load: Load
    name: str
    value: float | None
    against: str
    target: float | None
    is_ceiling: bool

    @property
    def is_met(self) -> bool | None:
        if self.value is None or self.target is None:
            return None
        return self.value <= self.target if self.is_ceiling else self.value >= self.target


def tokens_per_second(samples: Mapping[Cell, list[float]], num_questions: int) -> dict[Cell, float]:
    """Each cell's throughput, computed from the cell's median time."""
    return {
        cell: num_questions * cell.load.num_output / statistics.median(seconds) for cell, seconds in samples.items()
    }


def best_peer(speeds: Mapping[Cell, float], load: Load, kind: str) -> Cell | None:
    """The fastest cell of any peer in any dtype, or None."""
    cells = [cell for cell in speeds if cell.system.name != LORAMUX and (cell.load, cell.kind) == (load, kind)]
    return max(cells, key=lambda cell: speeds[cell], default=None)


def near_the_best(speeds: Mapping[Cell, float]) -> set[Cell]:
    """Cells that could still be the best for their load and kind."""
    best: dict[tuple[Load, str], float] = {}
    for cell, speed in speeds.items():
        best[cell.load, cell.kind] = max(speed, best.get((cell.load, cell.kind), 0.0))
    return {cell for cell, speed in speeds.items() if speed >= NEAR * best[cell.load, cell.kind]}


def is_hopeless(cell: Cell, samples: Mapping[Cell, list[float]]) -> bool:
    """True if the peer did the same work so much faster in another dtype or setting that this one is not worth
    measuring.
    """
    others = [
        statistics.median(seconds)
        for other, seconds in samples.items()
        if (other.system.name, other.load, other.kind) == (cell.system.name, cell.load, cell.kind)
    ]
    return min(others) < HOPELESS * statistics.median(samples[cell])


def ratios(
    speeds: Mapping[Cell, float],
    own_speeds: Mapping[Cell, float],
    loads: Iterable[Load],
    goals: Goals = FLOAT_GOALS,
) -> list[Ratio]:
    """Ratios to the best peer from `speeds`, and overheads from `own_speeds`, which includes all of loramux's turns."""
    found = []
    for load in loads:
        own = _by_kind(speeds, load)
        for kind, goal in goals.over_peers.items():
            best = best_peer(speeds, load, kind)
            value = own[kind] / speeds[best] if best is not None and kind in own else None
            against = "no peer" if best is None else best.system.label
            found.append(Ratio(load, f"{kind} over the best peer", value, against, goal, is_ceiling=False))
        own = _by_kind(own_speeds, load)
        target = goals.overhead.get(load)
        costs = ((DISTINCT, "all seven linears", target), (ATTENTION, "q/k/v/o", target and ATTENTION_OVERHEAD))
        for kind, modules, limit in costs:
            value = own[BASE] / own[kind] - 1.0 if BASE in own and kind in own else None
            name = f"overhead of distinct adapters, {modules}"
            found.append(Ratio(load, name, value, f"{LORAMUX}, {BASE}", limit, is_ceiling=True))
    return found


def _by_kind(speeds: Mapping[Cell, float], load: Load) -> dict[str, float]:
    return {cell.kind: speed for cell, speed in speeds.items() if cell.system.name == LORAMUX and cell.load == load}
