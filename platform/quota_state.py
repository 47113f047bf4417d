"""The policies and counters that one transaction works with: read under locks, kept in memory, written once."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    ColumnElement,
    CompoundSelect,
    Connection,
    Select,
    String,
    and_,
    any_,
    bindparam,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from loramux.migrations import schema
from loramux.platform.quota_check import Charge
from loramux.platform.quota_counters import Counter, CounterKey
from loramux.platform.quota_metrics import METRICS, Kind, Unit
from loramux.platform.quota_rules import Binding
from loramux.platform.quota_windows import NO_WINDOW, Window, window_at
from loramux.platform.quotas import PLATFORM, SHADOW, QuotaPolicy, policy_of

_policies, _counters, _tenants = schema.quota_policies, schema.quota_counters, schema.tenants

# All statements are built once: putting one together takes longer than SQLite needs to run it.
_WRITE_COUNTER = (
    update(_counters)
    .where(
        _counters.c.policy_id == bindparam("policy"),
        _counters.c.subject_id == bindparam("subject"),
        _counters.c.window_start_us == bindparam("start_us"),
    )
    .values(
        level=bindparam("new_level"),
        reserved=bindparam("new_reserved"),
        used=bindparam("new_used"),
        exceeded=bindparam("new_exceeded"),
        refilled_us=bindparam("new_refilled_us"),
    )
)


@dataclass(frozen=True, slots=True)
class _Statements:
    policies: Select[*tuple[Any, ...]]
    """Parameters: lists of `subject_ids` and of policies' `ids`."""
    locked_policies: CompoundSelect[*tuple[Any, ...]]
    timezones: Select[*tuple[Any, ...]]
    """A list of `ids`."""
    counters: Select[*tuple[Any, ...]]
    locked_counters: Select[*tuple[Any, ...]]


def among(dialect: str, column: Column[Any], name: str) -> ColumnElement[bool]:
    """Whether a column is one of the list that the parameter `name` is."""
    if dialect == "postgresql":
        # An array is one parameter however long it is, so that the server plans the statement once.
        return column == any_(bindparam(name, type_=ARRAY(String)))
    return column.in_(bindparam(name, expanding=True))


@functools.cache
def _statements(dialect: str) -> _Statements:
    # Only a subject's own policies are locked: those of the platform are everybody's, and their counters are locked
    # instead. One statement for both saves a way to the server.
    wanted = or_(among(dialect, _policies.c.subject_id, "subject_ids"), among(dialect, _policies.c.id, "ids"))
    own = select(_policies).where(wanted, _policies.c.subject_id != PLATFORM).order_by(_policies.c.id)
    owned = own.with_for_update().cte("own")
    shared = select(_policies).where(_policies.c.subject_id == PLATFORM)
    key = (_counters.c.policy_id, _counters.c.subject_id, _counters.c.window_start_us)
    if dialect == "postgresql":
        texts = [bindparam(name, type_=ARRAY(String)) for name in ("policy_ids", "subject_ids")]
        starts = bindparam("starts_us", type_=ARRAY(BigInteger))
        names = ("policy_id", "subject_id", "start_us")
        keys = func.unnest(*texts, starts).table_valued(*names).render_derived(name="wanted")
        counters = select(_counters).join(
            keys, and_(*(column == keys.c[name] for column, name in zip(key, names, strict=True)))
        )
    else:
        counters = select(_counters).where(tuple_(*key).in_(bindparam("keys", expanding=True)))
    return _Statements(
        policies=select(_policies).where(or_(wanted, _policies.c.subject_id == PLATFORM)).order_by(_policies.c.id),
        locked_policies=select(owned).union_all(shared),
        timezones=select(_tenants.c.id, _tenants.c.timezone).where(among(dialect, _tenants.c.id, "ids")),
        counters=counters,
        locked_counters=counters.order_by(*key).with_for_update(of=_counters),
    )


class QuotaState:
    """What is limited, and how far it is counted.

    Whoever changes a policy, or a counter of one that is not the platform's, locks the policy first; policies are
    locked in id order, and the counters of the platform's policies after them in the order of their keys. What was
    read under the locks is therefore still true when it is written. `is_locking` False reads for a look only.
    """

    def __init__(self, connection: Connection, is_locking: bool = True) -> None:
        self._connection = connection
        self._is_locking = is_locking
        self._dialect = connection.dialect.name
        self.policies: dict[str, QuotaPolicy] = {}
        self.counters: dict[CounterKey, Counter] = {}
        self._by_subject: dict[str, list[QuotaPolicy]] = {}
        self._timezones: dict[str, str] = {}
        self._bindings: dict[tuple[str, str | None, str | None], list[Binding]] = {}
        self._is_stored: set[CounterKey] = set()
        self._changed: set[CounterKey] = set()

    def read_policies(self, subject_ids: Collection[str], policy_ids: Collection[str]) -> None:
        """Read, and lock, the policies of some subjects, those named, and the platform's."""
        wanted = {"subject_ids": list(subject_ids), "ids": list(policy_ids)}
        statements = _statements(self._dialect)
        statement = statements.locked_policies if self._is_locking else statements.policies
        for row in self._connection.execute(statement, wanted):
            self.put_policy(policy_of(row))

    def put_policy(self, policy: QuotaPolicy) -> None:
        """Have a policy count, in place of the one that its subject has for its metric."""
        others = [other for other in self._by_subject.get(policy.subject_id, ()) if other.metric != policy.metric]
        self._by_subject[policy.subject_id] = [*others, policy]
        self.policies[policy.id] = policy

    @property
    def has_costs(self) -> bool:
        """Whether any of the policies is a budget in money."""
        return any(METRICS[policy.metric].unit is Unit.NANOS for policy in self.policies.values())

    def read_timezones(self, tenant_ids: Collection[str]) -> None:
        """Read where the days of these tenants, and of those whose policies were read, begin; for budgets only."""
        if not any(METRICS[policy.metric].kind is Kind.BUDGET for policy in self.policies.values()):
            return
        owners = {policy.tenant_id for policy in self.policies.values() if policy.tenant_id is not None}
        ids = {"ids": list(owners.union(tenant_ids))}
        self._timezones.update(
            (row.id, row.timezone) for row in self._connection.execute(_statements(self._dialect).timezones, ids)
        )

    def bindings(self, tenant_id: str, key_id: str | None, adapter_id: str | None, now_us: int) -> list[Binding]:
        """The policies that hold for a request of a tenant's key to an adapter."""
        caller = (tenant_id, key_id, adapter_id)
        found = self._bindings.get(caller)
        if found is None:
            narrower = [*self._by_subject.get(key_id or "", ()), *self._by_subject.get(adapter_id or "", ())]
            found = self._bindings[caller] = [
                Binding.of(policy, tenant_id, self._window(policy, tenant_id, now_us))
                for policy in (*self._of_tenant(tenant_id), *narrower)
                if METRICS[policy.metric].kind is not Kind.STOCK
            ]
        return found

    def stock_bindings(self, tenant_id: str) -> list[Binding]:
        """The policies that hold for what a tenant keeps."""
        return [
            Binding.of(policy, tenant_id)
            for policy in self._of_tenant(tenant_id)
            if METRICS[policy.metric].kind is Kind.STOCK
        ]

    def held(self, charges: Iterable[Mapping[str, Any]], tenant_id: str) -> list[tuple[Charge, Binding | None]]:
        """A reservation's charges with what they are of; None where the limit was lifted meanwhile."""
        found: list[tuple[Charge, Binding | None]] = []
        for document in charges:
            charge = Charge.from_json(document)
            policy = self.policies.get(charge.policy_id)
            window = Window(charge.window_start_us, charge.window_start_us)
            found.append((charge, None if policy is None else Binding.of(policy, tenant_id, window)))
        return found

    def read_counters(self, bindings: Iterable[Binding]) -> None:
        """Read the counters of these; those of the platform's policies are made where they are missing, and locked."""
        keys = {binding.key: binding for binding in bindings}
        shared = sorted(key for key, binding in keys.items() if binding.policy.scope == PLATFORM)
        is_locking = self._is_locking and bool(shared)
        self._read(sorted(keys), is_locking)
        missing = [key for key in shared if key not in self.counters] if self._is_locking else []
        if missing:
            self._insert_if_missing(missing, keys)
            self._read(missing, is_locking)

    def change(self, counters: Iterable[tuple[CounterKey, Counter]]) -> None:
        for key, counter in counters:
            self.counters[key] = counter
            self._changed.add(key)

    def write(self) -> None:
        """Write what was changed."""
        if not self._changed:
            return
        changed = sorted(self._changed)
        stored = [key for key in changed if key in self._is_stored]
        fresh = [key for key in changed if key not in self._is_stored]
        if stored:
            self._connection.execute(_WRITE_COUNTER, [_update_of(key, self.counters[key]) for key in stored])
        if fresh:
            self._connection.execute(insert(_counters), [_row_of(key, self.counters[key]) for key in fresh])

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

    def _read(self, keys: Sequence[CounterKey], is_locking: bool) -> None:
        if not keys:
            return
        statements = _statements(self._dialect)
        if self._dialect == "postgresql":
            policy_ids, subject_ids, starts_us = zip(*keys, strict=True)
            parameters = {
                "policy_ids": list(policy_ids),
                "subject_ids": list(subject_ids),
                "starts_us": list(starts_us),
            }
        else:
            parameters = {"keys": [tuple(key) for key in keys]}
        statement = statements.locked_counters if is_locking else statements.counters
        for row in self._connection.execute(statement, parameters):
            key = CounterKey(row.policy_id, row.subject_id, row.window_start_us)
            self.counters[key] = Counter(row.level, row.reserved, row.used, row.exceeded, row.refilled_us)
            self._is_stored.add(key)

    def _insert_if_missing(self, keys: Sequence[CounterKey], bindings: Mapping[CounterKey, Binding]) -> None:
        # Another gateway may be making the same ones: in one order, so that neither waits for the other in a circle.
        make = postgresql.insert if self._dialect == "postgresql" else sqlite.insert
        statement = make(_counters).on_conflict_do_nothing()
        rows = [_row_of(key, Counter.fresh(bindings[key].policy.burst, 0)) for key in keys]
        self._connection.execute(statement, rows)


def _update_of(key: CounterKey, counter: Counter) -> dict[str, Any]:
    return {
        "policy": key.policy_id,
        "subject": key.subject_id,
        "start_us": key.window_start_us,
        "new_level": counter.level,
        "new_reserved": counter.reserved,
        "new_used": counter.used,
        "new_exceeded": counter.exceeded,
        "new_refilled_us": counter.refilled_us,
    }


def _row_of(key: CounterKey, counter: Counter) -> dict[str, Any]:
    return {
        "policy_id": key.policy_id,
        "subject_id": key.subject_id,
        "window_start_us": key.window_start_us,
        "level": counter.level,
        "reserved": counter.reserved,
        "used": counter.used,
        "exceeded": counter.exceeded,
        "refilled_us": counter.refilled_us,
    }
