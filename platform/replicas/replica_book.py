"""Tracks which other servers are alive, and which are refused and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from loramux.platform.base_draw import BaseDraw
from loramux.platform.replicas.certificates import (
    CertificateRefused,
    Now,
    PublishedCertificate,
    read_certificates,
    utc_now,
)
from loramux.platform.replicas.records import ReplicaRow
from loramux.platform.replicas.replica_table import Summary, TableReading
from loramux.platform.replicas.residency import SummaryRefused, read_summary

GONE_S = 5.0
"""A server whose beat has not changed for this many seconds counts as gone."""
FORGOTTEN_S = 600.0
"""The rows of a server whose beat has not changed for this many seconds are deleted."""
MAX_GAP_S = 2.0
"""Maximum time, in seconds, that the gap between two readings adds to the age of a beat. During a longer gap, the
database may have been unreachable.
"""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another live server of the same version. It serves the same base, or one of the bases that requests are divided
    between.
    """

    row: ReplicaRow
    certificates: tuple[PublishedCertificate, ...]
    holds: frozenset[int]
    since_s: float
    """When the server's beat last changed, by this reader's clock."""


@dataclass(slots=True)
class _Sighting:
    """The state that the reader keeps for one row. Beats are compared with each other, never with a clock."""

    beat: Any
    changed_s: float
    unchanged_s: float = 0.0
    summary_version: int | None = None
    holds: frozenset[int] = frozenset()
    refusal: str | None = None
    certificates_pem: str = ""
    certificates: tuple[PublishedCertificate, ...] = field(default=())
    certificates_refusal: str = ""
    """Why a server without a valid certificate is refused."""


class ReplicaBook:
    """Derives `peers` and `refused` from readings of the tables. Pass each reading to `note`.

    `count_refusal` is called with the reason when a server is refused or its summary is ignored: `base`, `version`,
    `protocol`, `certificate`, `summary` or `malformed`. Each refusal is logged and counted once.
    """

    def __init__(
        self,
        own: ReplicaRow,
        draw: BaseDraw,
        count_refusal: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        now: Now = utc_now,
    ) -> None:
        self._own = own
        self._draw = draw
        self._count_refusal = count_refusal
        self._clock = clock
        self._now = now
        self._sightings: dict[str, _Sighting] = {}
        self._noted_s: float | None = None
        self.peers: Mapping[str, Peer] = {}
        self.refused: Mapping[str, str] = {}
        """The reason for each refusal, by the server's identifier."""

    @property
    def summary_versions(self) -> Mapping[str, int]:
        """The versions of the known summaries, by the server's identifier."""
        sightings = self._sightings.items()
        return {name: one.summary_version for name, one in sightings if one.summary_version is not None}

    @property
    def forgotten(self) -> Mapping[str, Any]:
        """The last beats of the servers whose rows should be deleted, by the server's identifier."""
        return {name: one.beat for name, one in self._sightings.items() if one.unchanged_s > FORGOTTEN_S}

    def note(self, reading: TableReading) -> None:
        now_s = self._clock()
        gap_s = 0.0 if self._noted_s is None else min(now_s - self._noted_s, MAX_GAP_S)
        self._noted_s = now_s
        self._draw.note_shares(reading.shares)
        peers: dict[str, Peer] = {}
        refused: dict[str, str] = {}
        sightings: dict[str, _Sighting] = {}
        for values in reading.rows:
            name = str(values["id"])
            if name == self._own.id:
                continue
            sighting = sightings[name] = self._sightings.get(name) or _Sighting(None, now_s)
            if values["beat"] == sighting.beat:
                sighting.unchanged_s += gap_s
            else:
                sighting.beat, sighting.changed_s, sighting.unchanged_s = values["beat"], now_s, 0.0
            self._note_summary(sighting, name, reading.summaries.get(name))
            if sighting.unchanged_s > GONE_S:
                continue
            try:
                row = msgspec.convert(values, ReplicaRow)
            except msgspec.ValidationError:
                refused[name] = self._refuse(sighting, name, "malformed", "its row has values that no server writes")
                continue
            problem = self._problem(row)
            if problem is not None:
                refused[name] = self._refuse(sighting, name, *problem)
                continue
            try:
                certificates = self._valid_certificates(sighting, row)
            except CertificateRefused as error:
                refused[name] = self._refuse(sighting, name, "certificate", str(error))
                continue
            sighting.refusal = None
            since_s = sighting.changed_s
            peers[name] = Peer(row=row, certificates=certificates, holds=sighting.holds, since_s=since_s)
        self._sightings, self.peers, self.refused = sightings, peers, refused

    def _problem(self, row: ReplicaRow) -> tuple[str, str] | None:
        own = self._own
        if row.protocol != own.protocol:
            return "protocol", f"it speaks protocol {row.protocol}, but this server speaks {own.protocol}"
        if row.version != own.version:
            return "version", f"it runs loramux {row.version}, but this server runs {own.version}"
        if row.base != own.base and not self._may_draw(row):
            return "base", "it serves another base model, dtype, quantisation or page size"
        return None

    def _may_draw(self, row: ReplicaRow) -> bool:
        return row.base_id is not None and row.base_id != self._own.base_id and row.base_id in self._draw.bases

    def _valid_certificates(self, sighting: _Sighting, row: ReplicaRow) -> tuple[PublishedCertificate, ...]:
        # Parsing is slow, and certificates rarely change.
        if row.certificates != sighting.certificates_pem:
            sighting.certificates_pem, sighting.certificates = row.certificates, ()
            try:
                sighting.certificates = read_certificates(row.id, row.certificates)
                sighting.certificates_refusal = "its certificate has expired"
            except CertificateRefused as error:
                sighting.certificates_refusal = str(error)
        now = self._now()
        valid = tuple(one for one in sighting.certificates if one.expires > now)
        if not valid:
            raise CertificateRefused(sighting.certificates_refusal)
        return valid

    def _note_summary(self, sighting: _Sighting, name: str, summary: Summary | None) -> None:
        if summary is None:
            return
        sighting.summary_version = summary.version
        try:
            sighting.holds = read_summary(summary.prefixes)
        except SummaryRefused as error:
            sighting.holds = frozenset()
            log.warning("a server's summary is ignored", replica=name, reason=str(error))
            self._count_refusal("summary")

    def _refuse(self, sighting: _Sighting, name: str, reason: str, sentence: str) -> str:
        if sighting.refusal != sentence:
            sighting.refusal = sentence
            log.warning("a server is refused as a replica", replica=name, reason=sentence)
            self._count_refusal(reason)
        return sentence
