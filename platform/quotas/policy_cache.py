"""Caches policies across transactions, until any policy changes."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ARRAY, Column, ColumnElement, Connection, String, any_, bindparam, or_, select

from loramux.migrations import schema
from loramux.migrations.database import Database, Moment
from loramux.platform.periods import NO_WINDOW, Window, window_at
from loramux.platform.quotas.decisions import Charge
from loramux.platform.quotas.metrics import METRICS, Kind, Metric, Unit
from loramux.platform.quotas.policies import PLATFORM, SHADOW, QuotaPolicy, policy_of
from loramux.platform.quotas.rules import Binding

MAX_ENTRIES = 200_000
"""Maximum number of entries in a cache: subjects, callers, and bindings of charges. A full cache is emptied."""

_policies, _tenants = schema.quota_policies, schema.tenants


@dataclass(frozen=True, slots=True)
class _Rules:
    """A caller's bindings, valid in `[start_us, end_us)`. In that time, no day or month of the caller ends."""

    bindings: Sequence[Binding]
    start_us: int
    end_us: int


class PolicyCache:
    """Caches policies and timezones. The cache is valid while the database's epoch is `epoch`.

    Every lookup is cached, even if it finds nothing. Any change to a policy or timezone starts a new epoch.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.has_costs = False
        """True if any of the cached policies is a cost budget."""
        self._has_windows = False
        self._reading = threading.Lock()
        self._policies: dict[str, QuotaPolicy | None] = {}
        self._by_subject: dict[str, list[QuotaPolicy]] = {}
        self._timezones: dict[str, str] = {}
        self._rules: dict[tuple[str, str | None, str | None, bool], _Rules] = {}
        self._held: dict[tuple[str, str, int], Binding] = {}

    @property
    def num_entries(self) -> int:
        return len(self._by_subject) + len(self._held) + len(self._rules)

    def read(
        self,
        connection: Connection,
        subject_ids: Collection[str],
        tenant_ids: Collection[str],
        policy_ids: Collection[str] = (),
    ) -> None:
        """Load missing policies of the platform and of `subject_ids`, and the policies in `policy_ids`.

        Also loads the timezones of `tenant_ids`, if a policy may need them.
        """
        # One thread reads at a time, so that other threads find either all of a subject's policies or none.
        with self._reading:
            subjects = [one for one in (PLATFORM, *subject_ids) if one not in self._by_subject]
            named = [one for one in policy_ids if one not in self._policies]
            if subjects or named:
                dialect = connection.dialect.name
                wanted = or_(among(dialect, _policies.c.subject_id, subjects), among(dialect, _policies.c.id, named))
                found = [policy_of(row) for row in connection.execute(select(_policies).where(wanted))]
                self._has_windows |= any(METRICS[policy.metric].period is not None for policy in found)
                self.has_costs |= any(METRICS[policy.metric].unit is Unit.NANOS for policy in found)
                # Read timezones first. If this read fails, no policy is cached.
                owners = {policy.tenant_id for policy in found if policy.tenant_id is not None}
                self._read_timezones(connection, owners)
                for subject in subjects:
                    self._by_subject[subject] = [policy for policy in found if policy.subject_id == subject]
                self._policies.update((one, None) for one in named)
                self._policies.update((policy.id, policy) for policy in found)
            self._read_timezones(connection, tenant_ids)

    def put(self, policy: QuotaPolicy) -> None:
        others = [other for other in self._by_subject.get(policy.subject_id, ()) if other.metric != policy.metric]
        self._by_subject[policy.subject_id] = [*others, policy]
        self._policies[policy.id] = policy
        self._has_windows |= METRICS[policy.metric].period is not None
        self.has_costs |= METRICS[policy.metric].unit is Unit.NANOS

    def bindings(
        self, tenant_id: str, key_id: str | None, adapter_id: str | None, is_batch: bool, now_us: int
    ) -> Sequence[Binding]:
        """Return the bindings of the policies that apply to a tenant's request with this key and adapter.

        With `is_batch`, the request belongs to a batch. Every policy that applies to other requests applies to it too.
        """
        caller = (tenant_id, key_id, adapter_id, is_batch)
        rules = self._rules.get(caller)
        if rules is None or not rules.start_us <= now_us < rules.end_us:
            narrower = [*self._by_subject.get(key_id or "", ()), *self._by_subject.get(adapter_id or "", ())]
            bindings = [
                Binding.of(policy, tenant_id, self._window(policy, tenant_id, now_us))
                for policy in (*self._of_tenant(tenant_id), *narrower)
                if _counts(METRICS[policy.metric], is_batch)
            ]
            windows = [NO_WINDOW, *(binding.window for binding in bindings)]
            start_us = max(window.start_us for window in windows)
            rules = _Rules(bindings, start_us, min(window.end_us for window in windows))
            self._rules[caller] = rules
        return rules.bindings

    def stock_bindings(self, tenant_id: str) -> list[Binding]:
        return [
            Binding.of(policy, tenant_id)
            for policy in self._of_tenant(tenant_id)
            if METRICS[policy.metric].kind is Kind.STOCK
        ]

    def held(self, charges: Iterable[Charge], tenant_id: str) -> list[Binding | None]:
        """Return one binding per charge of a reservation, or None for a limit that has since been removed."""
        return [self._holding(charge, tenant_id) for charge in charges]

    def _holding(self, charge: Charge, tenant_id: str) -> Binding | None:
        key = (charge.policy_id, tenant_id, charge.window_start_us)
        binding = self._held.get(key)
        if binding is None and (policy := self._policies.get(charge.policy_id)) is not None:
            window = Window(charge.window_start_us, charge.window_start_us)
            binding = self._held[key] = Binding.of(policy, tenant_id, window)
        return binding

    def _of_tenant(self, tenant_id: str) -> list[QuotaPolicy]:
        own = self._by_subject.get(tenant_id, [])
        # A shadow policy leaves the platform's policy in force.
        replaced = {policy.metric for policy in own if policy.mode != SHADOW}
        inherited = [policy for policy in self._by_subject.get(PLATFORM, ()) if policy.metric not in replaced]
        return [*own, *inherited]

    def _window(self, policy: QuotaPolicy, tenant_id: str, now_us: int) -> Window:
        period = METRICS[policy.metric].period
        if period is None:
            return NO_WINDOW
        # A tenant without a row has been deleted. The database refuses its reservation.
        return window_at(period, self._timezones.get(policy.tenant_id or tenant_id, "UTC"), now_us)

    def _read_timezones(self, connection: Connection, tenant_ids: Collection[str]) -> None:
        missing = [one for one in tenant_ids if one not in self._timezones] if self._has_windows else []
        if missing:
            wanted = among(connection.dialect.name, _tenants.c.id, missing)
            rows = connection.execute(select(_tenants.c.id, _tenants.c.timezone).where(wanted))
            self._timezones.update((row.id, row.timezone) for row in rows)


class PolicyReader:
    """Holds the policy cache of one process. Thread-safe, because an outdated cache is replaced as a whole.

    A transaction first locks its counters, then reads the time and the epoch. `cache_at` uses the epoch to determine
    whether the cache is still valid. A later policy change either waits for the locked counters or does not affect this
    transaction.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: PolicyCache | None = None
        self.latest_us = 0

    def cache(self, connection: Connection) -> PolicyCache:
        """Return the most recent cache, which may be outdated."""
        if self._cache is None or self._cache.num_entries > MAX_ENTRIES:
            moment = self._database.moment(connection)
            self._cache, self.latest_us = PolicyCache(moment.epoch), moment.now_us
        return self._cache

    def cache_at(self, moment: Moment, known: PolicyCache) -> PolicyCache:
        """Return `known`, or replace it with an empty cache if its epoch has passed."""
        self.latest_us = moment.now_us
        if known.epoch != moment.epoch:
            known = self._cache = PolicyCache(moment.epoch)
        return known


def _counts(metric: Metric, is_batch: bool) -> bool:
    """Return whether requests count in a metric."""
    return metric.kind is not Kind.STOCK and (is_batch or not metric.is_for_batches)


def among(dialect: str, wanted: Column[Any], values: Sequence[str]) -> ColumnElement[bool]:
    """Match rows in which the column has one of the values."""
    if dialect == "postgresql":
        # An array of any length is a single parameter, so the server plans the statement only once.
        return wanted == any_(bindparam(None, list(values), type_=ARRAY(String)))
    return wanted.in_(values)
