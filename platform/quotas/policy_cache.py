"""The policies of some subjects, kept between transactions for as long as nobody changes any."""

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
from loramux.platform.quotas.metrics import METRICS, Kind, Unit
from loramux.platform.quotas.policies import PLATFORM, SHADOW, QuotaPolicy, policy_of
from loramux.platform.quotas.rules import Binding

MAX_ENTRIES = 200_000
"""So many tenants, keys, adapters and combinations of them are kept in one cache; the next begins anew."""

_policies, _tenants = schema.quota_policies, schema.tenants


@dataclass(frozen=True, slots=True)
class _Rules:
    """What binds a caller in `[start_us, end_us)`, within which no day or month of its ends."""

    bindings: Sequence[Binding]
    start_us: int
    end_us: int


class PolicyCache:
    """Policies and timezones as they are while the database's epoch is `epoch`.

    Whatever was looked up is kept, also that there is nothing. A policy or a timezone that changes is another epoch.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.has_costs = False
        """Whether any of the policies is a budget in money."""
        self._has_windows = False
        self._reading = threading.Lock()
        self._policies: dict[str, QuotaPolicy | None] = {}
        self._by_subject: dict[str, list[QuotaPolicy]] = {}
        self._timezones: dict[str, str] = {}
        self._rules: dict[tuple[str, str | None, str | None], _Rules] = {}
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
        """Look up what is not known yet: the platform's policies, those of subjects, and those named.

        `tenant_ids` are those whose days and months may matter.
        """
        # One thread at a time: another that asks meanwhile must find all of what this one is reading, or nothing.
        with self._reading:
            subjects = [one for one in (PLATFORM, *subject_ids) if one not in self._by_subject]
            named = [one for one in policy_ids if one not in self._policies]
            if subjects or named:
                dialect = connection.dialect.name
                wanted = or_(among(dialect, _policies.c.subject_id, subjects), among(dialect, _policies.c.id, named))
                found = [policy_of(row) for row in connection.execute(select(_policies).where(wanted))]
                self._has_windows |= any(METRICS[policy.metric].period is not None for policy in found)
                self.has_costs |= any(METRICS[policy.metric].unit is Unit.NANOS for policy in found)
                # Before the policies are known, so that none is where this reading failed.
                owners = {policy.tenant_id for policy in found if policy.tenant_id is not None}
                self._read_timezones(connection, owners)
                for subject in subjects:
                    self._by_subject[subject] = [policy for policy in found if policy.subject_id == subject]
                self._policies.update((one, None) for one in named)
                self._policies.update((policy.id, policy) for policy in found)
            self._read_timezones(connection, tenant_ids)

    def put(self, policy: QuotaPolicy) -> None:
        """Have a policy count, in place of the one that its subject has for its metric."""
        others = [other for other in self._by_subject.get(policy.subject_id, ()) if other.metric != policy.metric]
        self._by_subject[policy.subject_id] = [*others, policy]
        self._policies[policy.id] = policy
        self._has_windows |= METRICS[policy.metric].period is not None
        self.has_costs |= METRICS[policy.metric].unit is Unit.NANOS

    def bindings(self, tenant_id: str, key_id: str | None, adapter_id: str | None, now_us: int) -> Sequence[Binding]:
        """The policies that hold for a request of a tenant's key to an adapter."""
        caller = (tenant_id, key_id, adapter_id)
        rules = self._rules.get(caller)
        if rules is None or not rules.start_us <= now_us < rules.end_us:
            narrower = [*self._by_subject.get(key_id or "", ()), *self._by_subject.get(adapter_id or "", ())]
            bindings = [
                Binding.of(policy, tenant_id, self._window(policy, tenant_id, now_us))
                for policy in (*self._of_tenant(tenant_id), *narrower)
                if METRICS[policy.metric].kind is not Kind.STOCK
            ]
            windows = [NO_WINDOW, *(binding.window for binding in bindings)]
            start_us = max(window.start_us for window in windows)
            rules = _Rules(bindings, start_us, min(window.end_us for window in windows))
            self._rules[caller] = rules
        return rules.bindings

    def stock_bindings(self, tenant_id: str) -> list[Binding]:
        """The policies that hold for what a tenant keeps."""
        return [
            Binding.of(policy, tenant_id)
            for policy in self._of_tenant(tenant_id)
            if METRICS[policy.metric].kind is Kind.STOCK
        ]

    def held(self, charges: Iterable[Charge], tenant_id: str) -> list[Binding | None]:
        """What each of a reservation's charges is of; None where the limit was lifted meanwhile."""
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
        # One that only watches leaves the platform's in force.
        replaced = {policy.metric for policy in own if policy.mode != SHADOW}
        inherited = [policy for policy in self._by_subject.get(PLATFORM, ()) if policy.metric not in replaced]
        return [*own, *inherited]

    def _window(self, policy: QuotaPolicy, tenant_id: str, now_us: int) -> Window:
        period = METRICS[policy.metric].period
        if period is None:
            return NO_WINDOW
        return window_at(period, self._timezones[policy.tenant_id or tenant_id], now_us)

    def _read_timezones(self, connection: Connection, tenant_ids: Collection[str]) -> None:
        missing = [one for one in tenant_ids if one not in self._timezones] if self._has_windows else []
        if missing:
            wanted = among(connection.dialect.name, _tenants.c.id, missing)
            rows = connection.execute(select(_tenants.c.id, _tenants.c.timezone).where(wanted))
            self._timezones.update((row.id, row.timezone) for row in rows)


class PolicyReader:
    """The cache of one process. Safe from several threads, since a cache that is no longer true is replaced as a whole.

    Whoever judges by a cache locks the counters first and then reads the moment, by which `cache_at` tells whether the
    cache still holds: a change that comes after that waits for the counters, or is of something that the transaction
    does not count.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: PolicyCache | None = None
        self.latest_us = 0
        """The time, as it was read last."""

    def cache(self, connection: Connection) -> PolicyCache:
        """The cache as it was known last."""
        if self._cache is None or self._cache.num_entries > MAX_ENTRIES:
            moment = self._database.moment(connection)
            self._cache, self.latest_us = PolicyCache(moment.epoch), moment.now_us
        return self._cache

    def cache_at(self, moment: Moment, known: PolicyCache) -> PolicyCache:
        """The `known` cache, or an empty one in its place where its epoch has passed."""
        self.latest_us = moment.now_us
        if known.epoch != moment.epoch:
            known = self._cache = PolicyCache(moment.epoch)
        return known


def among(dialect: str, wanted: Column[Any], values: Sequence[str]) -> ColumnElement[bool]:
    """Whether a column is one of some values."""
    if dialect == "postgresql":
        # An array is one parameter however long it is, so that the server plans the statement once.
        return wanted == any_(bindparam(None, list(values), type_=ARRAY(String)))
    return wanted.in_(values)
