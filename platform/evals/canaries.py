"""Rolls aliases back whose new versions fail or are slow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import structlog

from loramux.adapter_store.errors import StoreError
from loramux.adapter_store.registry.aliases import FIRST, AdapterAliases
from loramux.adapter_store.registry.records import CanaryRule, WatchedAlias
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations.database import DATABASE_TROUBLE, Database
from loramux.platform.evals.questions import ENDPOINT
from loramux.platform.ledger.outcomes import Outcomes, WatchedRequests, version_outcomes
from loramux.platform.ledger.prices import BATCHES
from loramux.platform.telemetry.package_metrics import EvalMetrics

MAX_PAGES = 10
"""Maximum number of pages of WATCHED_AT_ONCE aliases that one call of `check` looks at."""

ENOUGH_TENANTS = 100
"""Number of tenants after which a call of `check` reads no further page. Each tenant takes up to about 0.2 s."""

log = structlog.get_logger(__name__)


class Canaries:
    """Looks at the aliases with a canary. Blocking. Several servers can look: the first rollback ends the canary."""

    def __init__(
        self, database: Database, registry: AdapterRegistry, aliases: AdapterAliases, metrics: EvalMetrics
    ) -> None:
        self._database = database
        self._registry = registry
        self._aliases = aliases
        self._metrics = metrics
        self._after = FIRST

    def check(self) -> None:
        """Look at up to MAX_PAGES pages of aliases. The next call goes on after them, and finally starts again."""
        looks = list[tuple[WatchedAlias, dict[int, WatchedRequests]]]()
        tenant_ids = set[str]()
        for _ in range(MAX_PAGES):
            page, self._after = self._aliases.watched(self._after)
            for watched in page:
                with _one_failure_logged(watched):
                    looks.append((watched, self._requests(watched)))
                    tenant_ids.update(watched.tenant_ids)
            if self._after == FIRST or len(tenant_ids) >= ENOUGH_TENANTS:
                break
        # The requests of evals and batches wait behind others, so their times say nothing about the version.
        every = [requests for _, by_number in looks for requests in by_number.values()]
        found = version_outcomes(self._database, every, (ENDPOINT, BATCHES))
        for watched, by_number in looks:
            with _one_failure_logged(watched):
                self._check_one(watched, {number: found[requests] for number, requests in by_number.items()})

    def _requests(self, watched: WatchedAlias) -> dict[int, WatchedRequests]:
        """Return the requests by which each watched version is judged."""
        adapter, rule = self._registry.get_adapter(watched.adapter_id), watched.alias.canary
        if adapter is None or rule is None:
            return {}
        model = f"{adapter.tenant_slug}/{adapter.name}"
        since_us = watched.alias.updated_us
        return {number: WatchedRequests(watched.tenant_ids, f"{model}@{number}", since_us) for number in rule.versions}

    def _check_one(self, watched: WatchedAlias, found: Mapping[int, Outcomes]) -> None:
        rule = watched.alias.canary
        assert rule is not None
        judged = {number: judge(rule, outcomes) for number, outcomes in found.items()}
        failed = {number: verdict for number, verdict in judged.items() if verdict is not None}
        if failed:
            verdict = "; ".join(f"version {number}: {verdict}" for number, verdict in failed.items())
            self._roll_back(watched, failed.keys(), verdict)

    def _roll_back(self, watched: WatchedAlias, numbers: Collection[int], verdict: str) -> None:
        alias = watched.alias
        names = {"adapter_id": watched.adapter_id, "alias": alias.name}
        try:
            judged = self._aliases.fail_canary(watched.adapter_id, alias.name, alias.revision, numbers, verdict)
        except StoreError as error:
            # Somebody has moved or removed the alias, or another server has rolled it back.
            log.info("a canary ended before its verdict", **names, verdict=verdict, error=str(error))
            return
        if judged.revision == alias.revision:
            log.error("a canary cannot be rolled back", **names, verdict=verdict)
            return
        self._metrics.rollbacks.inc()
        log.warning("a canary was rolled back", **names, verdict=verdict)


@contextmanager
def _one_failure_logged(watched: WatchedAlias) -> Iterator[None]:
    """Keep a failure from holding up other canaries. Trouble with the database is raised, because it affects all."""
    try:
        yield
    except DATABASE_TROUBLE:
        raise
    except Exception:
        log.exception("a canary cannot be judged", adapter_id=watched.adapter_id, alias=watched.alias.name)


def judge(rule: CanaryRule, found: Outcomes) -> str | None:
    """Return what speaks against a version, or None.

    A version fails as soon as its errors would exceed the bound even if its other first requests succeeded.
    """
    counted = max(found.num_requests, rule.min_requests)
    if rule.max_error_rate is not None and found.num_failed > rule.max_error_rate * counted:
        return f"{found.num_failed} of {found.num_requests} requests failed"
    slowest_s = found.first_token_p95_s
    if rule.max_first_token_s is None or slowest_s is None or len(found.first_token_s) < rule.min_requests:
        return None
    if slowest_s <= rule.max_first_token_s:
        return None
    return f"the 95th percentile of the time to the first token is {slowest_s:.3g} s"
