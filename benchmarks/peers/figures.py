"""From seconds to tokens a second, to the best of the peers, to the ratios that count."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from benchmarks.peers.system import LORAMUX, System
from benchmarks.peers.workload import ATTENTION, BASE, DISTINCT, PEER_KINDS, SAME, Load

OVER_PEERS = {BASE: 1.0, DISTINCT: 2.6, SAME: 1.2}
"""How often the best peer's tokens a second loramux is to give at least, at every load."""

OVERHEAD = {Load(64, 32): 0.15, Load(32, 128): 0.22}
"""The most that adapters on all seven linears may cost over loramux' own base, by load."""

ATTENTION_OVERHEAD = 0.10
"""The same with adapters on q, k, v and o, at every load that has a target."""

NEAR = 0.7
"""Of the best; what is slower than this cannot become the best by a machine's drift."""


HOPELESS = 0.35
"""Of the best; a dtype below it, which the processor has to imitate, is tried no further."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of work at one load, done by one system."""

    system: System
    load: Load
    kind: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure beside its target; `against` is what it is over. None: there was nothing to measure it on."""

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
    """By the median of each cell's seconds."""
    return {
        cell: num_questions * cell.load.num_output / statistics.median(seconds) for cell, seconds in samples.items()
    }


def best_peer(speeds: Mapping[Cell, float], load: Load, kind: str) -> Cell | None:
    """Of all peers in all dtypes."""
    cells = [cell for cell in speeds if cell.system.name != LORAMUX and (cell.load, cell.kind) == (load, kind)]
    return max(cells, key=lambda cell: speeds[cell], default=None)


def near_the_best(speeds: Mapping[Cell, float]) -> set[Cell]:
    """Cells that may be the best of those of their load and kind."""
    best: dict[tuple[Load, str], float] = {}
    for cell, speed in speeds.items():
        best[cell.load, cell.kind] = max(speed, best.get((cell.load, cell.kind), 0.0))
    return {cell for cell, speed in speeds.items() if speed >= NEAR * best[cell.load, cell.kind]}


def is_hopeless(cell: Cell, samples: Mapping[Cell, list[float]]) -> bool:
    """Whether the same peer has done this work so much faster in another way that no other kind need be tried."""
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
    kinds: Collection[str] = PEER_KINDS,
) -> list[Ratio]:
    """Over the peers by `speeds`, and what adapters cost by `own_speeds`, those of loramux over all its turns."""
    found = []
    for load in loads:
        own = _by_kind(speeds, load)
        for kind in kinds:
            best = best_peer(speeds, load, kind)
            value = own[kind] / speeds[best] if best is not None and kind in own else None
            against = "no peer" if best is None else best.system.label
            found.append(Ratio(load, f"{kind} over the best peer", value, against, OVER_PEERS[kind], is_ceiling=False))
        own = _by_kind(own_speeds, load)
        target = OVERHEAD.get(load)
        costs = ((DISTINCT, "all seven linears", target), (ATTENTION, "q/k/v/o", target and ATTENTION_OVERHEAD))
        for kind, modules, limit in costs:
            value = own[BASE] / own[kind] - 1.0 if BASE in own and kind in own else None
            name = f"overhead of distinct adapters, {modules}"
            found.append(Ratio(load, name, value, f"{LORAMUX}, {BASE}", limit, is_ceiling=True))
    return found


def _by_kind(speeds: Mapping[Cell, float], load: Load) -> dict[str, float]:
    """Those of loramux."""
    return {cell.kind: speed for cell, speed in speeds.items() if cell.system.name == LORAMUX and cell.load == load}
