"""Reads how the most recent requests for versions ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, Select, select

from loramux.engine.protocol.service_tiers import SERVICE_TIERS
from loramux.migrations.database import Database
from loramux.migrations.schema import usage_events
from loramux.platform.ledger.settlement import MODEL_FAILED

MAX_READ = 2000
"""Number of a tenant's most recent requests for a version that are looked at."""

MAX_SEARCHED = 50_000
"""Number of a tenant's most recent requests, for all models, among which those for a version are looked for."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """`num_failed` requests of `num_requests` failed by a possible fault of the version. Requests that failed for
    another reason are not counted. `first_token_s` are the times to first tokens in seconds, sorted, without those of
    the last service tier, whose requests wait for others.
    """

    num_requests: int
    num_failed: int
    first_token_s: tuple[float, ...]

    @property
    def first_token_p95_s(self) -> float | None:
        count = len(self.first_token_s)
        # The nearest rank, as on the console's page of latencies.
        return self.first_token_s[-(-count * 95 // 100) - 1] if count else None


@dataclass(frozen=True, slots=True)
class WatchedRequests:
    """The requests of these tenants for `model`, a version's full name, that began after `since_us`."""

    tenant_ids: tuple[str, ...]
    model: str
    since_us: int


def version_outcomes(
    database: Database, watched: Iterable[WatchedRequests], but_endpoints: Collection[str]
) -> dict[WatchedRequests, Outcomes]:
    """Return the outcomes of requests, without those to `but_endpoints`.

    Each tenant's most recent requests are read once for all versions, in up to about 0.2 s.
    """
    tallies = {requests: _Tally() for requests in watched}
    by_tenant = defaultdict[str, list[WatchedRequests]](list)
    for requests in tallies:
        for tenant_id in requests.tenant_ids:
            by_tenant[tenant_id].append(requests)
    for tenant_id, wanted in by_tenant.items():
        with database.read() as connection:
            rows = connection.execute(_recent_requests(tenant_id, wanted, but_endpoints)).all()
        by_model = defaultdict[str, list[WatchedRequests]](list)
        for requests in wanted:
            by_model[requests.model].append(requests)
        num_read = Counter[WatchedRequests]()
        for row in rows:
            for requests in by_model[row.model]:
                if row.started_us >= requests.since_us and num_read[requests] < MAX_READ:
                    num_read[requests] += 1
                    tallies[requests].add(row)
    return {requests: tally.outcomes() for requests, tally in tallies.items()}


def _recent_requests(
    tenant_id: str, wanted: Collection[WatchedRequests], but_endpoints: Collection[str]
) -> Select[Any]:
    # No index has the model, and one more would slow down every request. The database drops other models' rows much
    # faster than Python would.
    table = usage_events.c
    times = (table.started_us, table.finished_us, table.first_token_us)
    columns = (table.model, table.endpoint, table.status, *times, table.service_tier)
    since_us = min(requests.since_us for requests in wanted)
    searched = select(*columns).where(table.tenant_id == tenant_id, table.finished_us > since_us)
    recent = searched.order_by(table.finished_us.desc()).limit(MAX_SEARCHED).subquery("recent").c
    shown = (recent.model, recent.status, recent.started_us, recent.first_token_us, recent.service_tier)
    found = select(*shown).where(
        recent.model.in_({requests.model for requests in wanted}),
        recent.started_us >= since_us,
        recent.endpoint.not_in(but_endpoints),
    )
    # Most tenants have one canary, for which this is all that is used.
    return found.order_by(recent.finished_us.desc()).limit(MAX_READ if len(wanted) == 1 else MAX_SEARCHED)


@dataclass(slots=True)
class _Tally:
    num_requests: int = 0
    num_failed: int = 0
    first_token_s: list[float] = field(default_factory=list)

    def add(self, row: Row[Any]) -> None:
        if row.status != "failed":
            self.num_requests += 1
            self.num_failed += row.status == MODEL_FAILED
        if row.first_token_us is not None and row.service_tier != SERVICE_TIERS[-1]:
            self.first_token_s.append((row.first_token_us - row.started_us) / 1_000_000)

    def outcomes(self) -> Outcomes:
        return Outcomes(self.num_requests, self.num_failed, tuple(sorted(self.first_token_s)))
