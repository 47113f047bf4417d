"""The parameters of one run of the simulation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The defaults describe a fleet that serves a model with 8 billion parameters and adapters of rank 16, 84 MB
    each."""

    num_adapters: int = 10_000
    num_replicas: int = 50
    pool_adapters: int = 200
    """Number of adapters that one replica's pool holds. A full pool evicts the least recently used idle adapter."""
    capacity: int = 32
    """Number of sequences that one replica runs at once. Other sequences wait, first come, first served."""
    zipf: float = 1.0
    """Exponent of Zipf's law for the adapters' popularity."""
    load: float = 0.7
    """Offered load, as a fraction of the fleet's capacity."""
    num_gateways: int = 4
    is_warm: bool = True
    """True to fill the pools before the run as if each adapter had been requested once, least popular first."""
    min_answer_s: float = 1.0
    max_answer_s: float = 5.0
    """A sequence's time in its slot is uniformly distributed between these bounds."""
    min_load_s: float = 0.2
    max_load_s: float = 1.0
    """The time to load an adapter from the disk or the blob store is uniformly distributed between these bounds."""
    parallel_loads: int = 4
    """Number of adapters that one replica loads at once."""
    report_s: float = 1.0
    """Time between two reports of a replica, and between two reads of the reports by a gateway."""
    settle_s: float = 60.0
    """Simulated time before the measurement begins."""
    measure_s: float = 120.0
    seed: int = 1

    def popularity(self) -> list[float]:
        """Each adapter's share of the requests, most popular first."""
        weights = [(rank + 1) ** -self.zipf for rank in range(self.num_adapters)]
        total = sum(weights)
        return [weight / total for weight in weights]

    @property
    def requests_per_s(self) -> float:
        mean_answer_s = (self.min_answer_s + self.max_answer_s) / 2
        return self.load * self.num_replicas * self.capacity / mean_answer_s
