"""The row and the adapter summary that this server publishes."""

from __future__ import annotations

from typing import Any

import msgspec

from loramux.engine.protocol.messages import Stats
from loramux.platform.replicas.certificates import OwnCertificates
from loramux.platform.replicas.records import ReplicaRow
from loramux.platform.replicas.replica_table import Summary
from loramux.platform.replicas.residency import read_summary, summarise
from loramux.platform.routing.views import ReplicaView


class OwnReplica:
    """This server's row and the summary of its adapters, as of the last call of `observe`."""

    def __init__(self, row: ReplicaRow, certificates: OwnCertificates) -> None:
        self.row = row
        self.summary = Summary(version=0, prefixes=b"")
        self._certificates = certificates

    def drain(self) -> None:
        self.row = msgspec.structs.replace(self.row, state="draining")

    def observe(self, stats: Stats | None) -> None:
        """Begin a beat with the engine's statistics. Without statistics, the summary is empty."""
        changes: dict[str, Any] = {"beat": self.row.beat + 1, "certificates": self._certificates.pem}
        if stats is not None:
            changes |= {
                # Background sequences do not keep others from running here.
                "num_running": stats.num_running - stats.num_background_running,
                "num_waiting": stats.num_waiting - stats.num_background_waiting,
                # Of several engines, one can be gone.
                "capacity": stats.max_sequences or self.row.capacity,
                "num_pages": stats.num_pages,
                "num_free_pages": stats.num_reclaimable_pages,
            }
        self.row = msgspec.structs.replace(self.row, **changes)
        prefixes = b"" if stats is None else summarise(one.digest for one in stats.adapters)
        if prefixes != self.summary.prefixes:
            self.summary = Summary(version=self.summary.version + 1, prefixes=prefixes)

    def view(self, since_s: float) -> ReplicaView:
        return view_of(self.row, read_summary(self.summary.prefixes), since_s, is_local=True)


def view_of(row: ReplicaRow, holds: frozenset[int], since_s: float, is_local: bool = False) -> ReplicaView:
    return ReplicaView(
        id=row.id,
        is_local=is_local,
        base_id=row.base_id,
        num_running=row.num_running,
        num_waiting=row.num_waiting,
        capacity=row.capacity,
        pages_free_fraction=row.pages_free_fraction,
        is_draining=row.state == "draining",
        holds=holds,
        since_s=since_s,
    )
