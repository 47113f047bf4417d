"""Reads how the most recent requests for one version ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import select

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
    another reason are not counted. `first_token_s` are the times to first tokens in seconds, sorted.
    """

    num_requests: int
    num_failed: int
    first_token_s: tuple[float, ...]

    @property
    def first_token_p95_s(self) -> float | None:
        count = len(self.first_token_s)
        return self.first_token_s[min(count - 1, count * 95 // 100)] if count else None


def version_outcomes(
    database: Database, tenant_ids: Collection[str], model: str, since_us: int, but_endpoints: Collection[str]
) -> Outcomes:
    """Return the outcomes of the tenants' requests for `model`, a version's full name, that began after `since_us`.

    Requests to `but_endpoints` are left out. The time that this takes does not depend on the size of the ledger.
    """
    table = usage_events.c
    num_requests, num_failed, waits = 0, 0, list[float]()
    with database.read() as connection:
        for tenant_id in tenant_ids:
            # No index has the model, and one more would slow down every request. The database drops other models' rows
            # much faster than Python would.
            columns = (table.model, table.endpoint, table.status, table.started_us, table.finished_us)
            recent = select(*columns, table.first_token_us).where(
                table.tenant_id == tenant_id, table.finished_us > since_us
            )
            found = recent.order_by(table.finished_us.desc()).limit(MAX_SEARCHED).subquery("recent")
            query = select(found.c.status, found.c.started_us, found.c.first_token_us).where(
                found.c.model == model, found.c.started_us >= since_us, found.c.endpoint.not_in(but_endpoints)
            )
            for row in connection.execute(query.order_by(found.c.finished_us.desc()).limit(MAX_READ)):
                if row.status != "failed":
                    num_requests += 1
                    num_failed += row.status == MODEL_FAILED
                if row.first_token_us is not None:
                    waits.append((row.first_token_us - row.started_us) / 1_000_000)
    return Outcomes(num_requests, num_failed, tuple(sorted(waits)))
