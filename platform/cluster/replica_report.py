"""What a replica tells the gateways of its cluster: what it is, and what it holds.

Ray Serve sends every change of a report to every gateway, so a report contains no value that changes without need.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any

import msgspec

from loramux.engine.protocol.messages import PROTOCOL, EngineReady, Stats
from loramux.platform.replicas.records import Count, base_fingerprint
from loramux.platform.replicas.residency import MAX_SUMMARY_BYTES, SummaryRefused, read_summary, summarise

NUM_STEPS = 8
"""Loads and free pages are reported in this many steps."""


class ReportRefused(Exception):
    """A report of a replica cannot be used. The message says why."""


class ReplicaIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a replica lives. The constraints are checked when a gateway reads it."""

    base: Annotated[str, msgspec.Meta(max_length=64)]
    """The `base_fingerprint` of the engine: replicas with different fingerprints do not share requests."""
    base_id: Annotated[str, msgspec.Meta(max_length=64)]
    version: Annotated[str, msgspec.Meta(max_length=40)]
    protocol: Count
    capacity: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    """Maximum number of sequences that the engine runs at once."""
    num_pages: Count
    host: Annotated[str, msgspec.Meta(max_length=253)]
    """Name of the machine, for operators."""

    @staticmethod
    def of(ready: EngineReady, capacity: int) -> ReplicaIdentity:
        return ReplicaIdentity(
            base=base_fingerprint(ready),
            base_id=ready.base_sha256,
            version=version("loramux"),
            protocol=PROTOCOL,
            capacity=capacity,
            num_pages=ready.num_pages,
            host=socket.gethostname(),
        )


class HeldState(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's load, free pages and adapters, coarse enough to stay the same while little changes."""

    holds: Annotated[bytes, msgspec.Meta(max_length=MAX_SUMMARY_BYTES)] = b""
    """A summary as `residency.summarise` writes it."""
    num_sequences: Count = 0
    """Running and waiting sequences, in steps of an eighth of the capacity."""
    num_free_pages: Count = 0
    """Pages available to new requests, in steps of an eighth of the pool."""


class CoarseState:
    """The state that a replica reports. A number changes only when it is off by a whole step."""

    def __init__(self, identity: ReplicaIdentity) -> None:
        self._sequence_step = max(1, identity.capacity // NUM_STEPS)
        self._page_step = max(1, identity.num_pages // NUM_STEPS)
        self.last = HeldState(num_free_pages=identity.num_pages)

    def observe(self, stats: Stats) -> HeldState:
        self.last = HeldState(
            holds=summarise(one.digest for one in stats.adapters),
            num_sequences=_coarse(stats.num_foreground, self.last.num_sequences, self._sequence_step),
            num_free_pages=_coarse(stats.num_reclaimable_pages, self.last.num_free_pages, self._page_step),
        )
        return self.last


def _coarse(value: int, last: int, step: int) -> int:
    return last if abs(value - last) < step else value // step * step


def as_values(record: ReplicaIdentity | HeldState) -> dict[str, Any]:
    """Return the record as Ray Serve carries it: a dictionary of strings, numbers and bytes."""
    return msgspec.structs.asdict(record)


def read_identity(values: Mapping[str, Any]) -> ReplicaIdentity:
    """Raises ReportRefused if no replica of loramux has written the values."""
    try:
        return msgspec.convert(values, ReplicaIdentity)
    except msgspec.ValidationError:
        raise ReportRefused("it is no replica of loramux, or runs another version of loramux") from None


def read_state(values: Mapping[str, Any]) -> tuple[HeldState, frozenset[int]]:
    """Return the state, and the prefixes of the adapters that the replica holds.

    Before a replica's first report, `values` is empty. Raises ReportRefused.
    """
    try:
        state = msgspec.convert(values, HeldState)
        return state, read_summary(state.holds)
    except (msgspec.ValidationError, SummaryRefused):
        raise ReportRefused("its report has values that no replica writes") from None
