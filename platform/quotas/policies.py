"""Quota policies, which limit the usage of tenants, keys and adapters. Each subject has at most one policy per metric.

A policy limits one metric of one subject: the platform, a tenant, a key or an adapter. A tenant without a hard or soft
policy of its own inherits the platform's policy, but has its own counter. Every policy that applies to a request must
admit it.

- A budget counts reservations made after the budget is set, in daily or monthly windows of its tenant's timezone. A
  change to the timezone starts new windows immediately. A reservation stays in the window in which it was made.
- `soft` and `shadow` policies never refuse requests. Under a rate or concurrency limit, only requests within the limit
  are charged, so `exceeded` counts the admissions and extensions that a hard policy would refuse. Under a budget, all
  usage is charged. The header `x-loramux-quota-exceeded` tells callers about exceeded soft limits, never about shadow
  policies. A refusal names its policy in `x-loramux-quota-policy`, unless another tenant owns the policy.
- Contradictions are refused: a daily budget above the monthly budget if both are hard, a burst for a metric that is not
  a rate, and a limit of 0 with another burst, or the reverse. A key's limit can exceed its tenant's limit. The lower
  limit applies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Table, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from loramux.migrations import schema
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_page
from loramux.platform.errors import Conflict, InvalidRequest, NotFound
from loramux.platform.quotas.counters import Counter
from loramux.platform.quotas.metrics import BUDGET_PAIRS, METRICS, Kind, Metric, Unit

PLATFORM = "platform"

ADAPTER = "adapter"
"""The scope of policies that limit calls to an adapter, separately for each tenant that uses the adapter."""

HARD, SOFT, SHADOW = MODES = ("hard", "soft", "shadow")

_policies, _counters = schema.quota_policies, schema.quota_counters
_SUBJECTS: Mapping[str, tuple[str, Table]] = {
    "ten": ("tenant", schema.tenants),
    "key": ("key", schema.api_keys),
    "ada": (ADAPTER, schema.adapters),
}


@dataclass(frozen=True, slots=True)
class QuotaPolicy:
    """One limit of one subject.

    `burst` is the size of a rate's bucket. For other kinds, it repeats the limit. `hard` refuses requests beyond the
    limit, `soft` admits and reports them, and `shadow` only counts them.
    """

    id: str
    scope: str
    subject_id: str
    tenant_id: str | None
    metric: str
    mode: str
    limit: int
    burst: int
    created_us: int
    updated_us: int


@dataclass(frozen=True, slots=True)
class _Subject:
    scope: str
    id: str
    tenant_id: str | None


@dataclass(frozen=True, slots=True)
class _Held:
    """A subject and its policies by metric. If `_hold` locked them, they stay locked until the transaction ends."""

    subject: _Subject
    policies: Mapping[str, QuotaPolicy]


class QuotaPolicies:
    """The policies in the database. A metric without a policy is unlimited.

    A tenant's own policy replaces the platform's policy for the same metric. A shadow policy only counts, and leaves
    the platform's policy in force. Policies of keys and adapters apply in addition to the tenant's.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def set(
        self, subject_id: str, metric: str, limit: int, burst: int | None = None, mode: str | None = None
    ) -> QuotaPolicy:
        """Create or change the policy of a tenant, key or adapter, or of PLATFORM, for `metric`.

        `burst` defaults to the limit, and `mode` to the policy's current mode, or `hard` for a new policy. Raises
        InvalidRequest with the field's name, NotFound for an unknown subject, or Conflict.
        """
        check_policy(metric, limit, burst, mode)
        try:
            with self._database.write() as connection:
                held = self._hold(connection, subject_id)
                wanted = self._wanted(connection, held, metric, limit, burst, mode)
                _write(connection, held.policies.get(metric), wanted)
        except IntegrityError:
            raise Conflict(f"another call is setting {metric} at the same time; try again") from None
        return wanted

    def propose(
        self, subject_id: str, metric: str, limit: int, burst: int | None = None, mode: str | None = None
    ) -> QuotaPolicy:
        """Return the policy that `set` would write, without writing it. Raises InvalidRequest or NotFound."""
        check_policy(metric, limit, burst, mode)
        with self._database.read() as connection:
            held = self._hold(connection, subject_id, is_locking=False)
            return self._wanted(connection, held, metric, limit, burst, mode)

    def change(
        self,
        policy_id: str,
        limit: int | None = None,
        burst: int | None = None,
        mode: str | None = None,
        check: Callable[[QuotaPolicy], None] = lambda policy: None,
    ) -> QuotaPolicy:
        """Change fields of a policy. `check` receives the current policy and can raise to prevent the change.

        A burst that equals the limit changes with the limit. Raises InvalidRequest or NotFound.
        """
        unknown = NotFound("there is no such quota", code="quota_not_found")
        with self._database.write() as connection:
            # A policy's subject and metric never change, so they can be read before the locks are taken.
            row = connection.execute(select(_policies).where(_policies.c.id == policy_id)).one_or_none()
            if row is None:
                raise unknown
            held = self._hold(connection, row.subject_id)
            policy = held.policies.get(row.metric)
            if policy is None or policy.id != policy_id:
                raise unknown
            check(policy)
            new_limit = policy.limit if limit is None else limit
            if burst is None and policy.burst != policy.limit and new_limit:
                burst = policy.burst
            check_policy(policy.metric, new_limit, burst, mode)
            wanted = self._wanted(connection, held, policy.metric, new_limit, burst, mode)
            _write(connection, policy, wanted)
        return wanted

    def list(
        self,
        tenant_id: str | None,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        only: Collection[str] | None = None,
    ) -> Page[QuotaPolicy]:
        """List the policies of a tenant, its keys and its adapters. If `tenant_id` is None, list all policies.

        `only` restricts the list to policies of these subjects.
        """
        query = select(_policies)
        if tenant_id is not None:
            query = query.where(_policies.c.tenant_id == tenant_id)
        if only is not None:
            query = query.where(_policies.c.subject_id.in_(only))
        with self._database.read() as connection:
            return keyset_page(connection, query, _policies.c.id, policy_of, limit, after, before)

    def get(self, policy_id: str) -> QuotaPolicy | None:
        with self._database.read() as connection:
            row = connection.execute(select(_policies).where(_policies.c.id == policy_id)).one_or_none()
        return policy_of(row) if row is not None else None

    def delete(self, policy_id: str) -> bool:
        """Delete a policy and its counters. Return False if there is no such policy."""
        with self._database.write() as connection:
            locked = select(_policies).where(_policies.c.id == policy_id).with_for_update()
            row = connection.execute(locked).one_or_none()
            if row is None:
                return False
            now_us, before = self._database.now_us(connection), _shown(policy_of(row))
            audit(connection, now_us, "quota.delete", policy_id, tenant_id=row.tenant_id, before=before)
            connection.execute(delete(_counters).where(_counters.c.policy_id == policy_id))
            connection.execute(delete(_policies).where(_policies.c.id == policy_id))
        return True

    def _hold(self, connection: Connection, subject_id: str, is_locking: bool = True) -> _Held:
        subject = _find_subject(connection, subject_id, is_locking)
        query = select(_policies).where(_policies.c.subject_id == subject.id).order_by(_policies.c.id)
        rows = connection.execute(query.with_for_update() if is_locking else query)
        return _Held(subject, {row.metric: policy_of(row) for row in rows})

    def _wanted(
        self, connection: Connection, held: _Held, metric: str, limit: int, burst: int | None, mode: str | None
    ) -> QuotaPolicy:
        subject = held.subject
        if subject.scope not in METRICS[metric].scopes:
            raise InvalidRequest(f"{metric} can be limited only for a tenant or the platform", param="metric")
        now_us = self._database.now_us(connection)
        old = held.policies.get(metric)
        wanted = QuotaPolicy(
            id=old.id if old is not None else new_id("qta"),
            scope=subject.scope,
            subject_id=subject.id,
            tenant_id=subject.tenant_id,
            metric=metric,
            mode=mode or (old.mode if old is not None else HARD),
            limit=limit,
            burst=limit if burst is None else burst,
            created_us=old.created_us if old is not None else now_us,
            updated_us=now_us,
        )
        check_agreement({**held.policies, metric: wanted})
        return wanted


def _shown(policy: QuotaPolicy) -> dict[str, object]:
    """Describe a policy for the audit log. The names of amounts of money and bytes end in their unit."""
    unit = METRICS[policy.metric].unit
    suffix = f"_{unit}" if unit in (Unit.NANOS, Unit.BYTES) else ""
    return {
        "scope": policy.scope,
        "subject_id": policy.subject_id,
        "metric": policy.metric,
        "mode": policy.mode,
        f"limit{suffix}": policy.limit,
        f"burst{suffix}": policy.burst,
    }


def policy_of(row: Row[Any]) -> QuotaPolicy:
    return QuotaPolicy(
        id=row.id,
        scope=row.scope,
        subject_id=row.subject_id,
        tenant_id=row.tenant_id,
        metric=row.metric,
        mode=row.mode,
        limit=row.limit_value,
        burst=row.burst,
        created_us=row.created_us,
        updated_us=row.updated_us,
    )


def check_policy(metric: str, limit: int, burst: int | None, mode: str | None) -> None:
    """Raise InvalidRequest, with the field's name, for an invalid policy."""
    known = METRICS.get(metric)
    if known is None:
        raise InvalidRequest(f"metric must be one of {', '.join(METRICS)}", param="metric")
    if mode is not None and mode not in MODES:
        raise InvalidRequest(f"mode must be one of {', '.join(MODES)}", param="mode")
    if not 0 <= limit <= known.max_limit:
        raise InvalidRequest(f"a limit of {metric} must be from 0 to {_most(known)}", param="limit")
    if burst is None:
        return
    if known.kind is not Kind.RATE:
        raise InvalidRequest(f"{metric} has no burst: only rates have one", param="burst")
    if not 0 <= burst <= known.max_limit:
        raise InvalidRequest(f"a burst must be from 0 to {_most(known)}", param="burst")
    if burst < 1 <= limit:
        raise InvalidRequest("a burst of 0 would admit nothing: use a limit of 0", param="burst")
    if limit < 1 <= burst:
        raise InvalidRequest("with a limit of 0, a burst would be admitted once and never refill", param="burst")


def _most(metric: Metric) -> str:
    """Return the highest limit, in the unit of the call and, for money, in the currency."""
    if metric.unit is not Unit.NANOS:
        return str(metric.max_limit)
    return f"{metric.max_limit} nanos, which is {metric.text(metric.max_limit)} in the currency"


def check_agreement(policies: Mapping[str, QuotaPolicy]) -> None:
    """Raise InvalidRequest if a subject's policies contradict each other. `policies` maps metrics to policies."""
    for day, month in BUDGET_PAIRS:
        if day not in policies or month not in policies:
            continue
        # A soft or shadow policy may be a trial for a later limit.
        if policies[day].mode == policies[month].mode == HARD and policies[day].limit > policies[month].limit:
            raise InvalidRequest(
                f"{day} would be {METRICS[day].text(policies[day].limit)} and could never be reached, "
                f"because {month} is {METRICS[month].text(policies[month].limit)}",
                param="limit",
                code="contradictory_limit",
            )


def _find_subject(connection: Connection, subject_id: str, is_locking: bool) -> _Subject:
    """Return the subject with this ID. Raises NotFound, or InvalidRequest for a platform key.

    With `is_locking`, the subject is locked, so that concurrent changes to its policies take turns.
    """
    if subject_id == PLATFORM:
        return _Subject(PLATFORM, PLATFORM, None)
    scope, table = _SUBJECTS.get(subject_id[:3], (None, None))
    row = None
    if table is not None:
        # FOR UPDATE would be too strong, because a reservation's foreign key locks the tenant while the policies are
        # locked.
        query = select(table).where(table.c.id == subject_id)
        row = connection.execute(query.with_for_update(key_share=True) if is_locking else query).one_or_none()
    if scope is None or row is None:
        raise NotFound("there is no such tenant, key or adapter", param="subject")
    tenant_id = row.id if scope == "tenant" else row.tenant_id
    if tenant_id is None:
        raise InvalidRequest("a platform key cannot run inference, so quotas do not apply to it", param="key")
    return _Subject(scope, row.id, tenant_id)


def _write(connection: Connection, old: QuotaPolicy | None, new: QuotaPolicy) -> None:
    if old is None:
        _insert(connection, new)
    else:
        _change(connection, old, new)
    changed = {"before": None if old is None else _shown(old), "after": _shown(new)}
    audit(connection, new.updated_us, "quota.set", new.id, tenant_id=new.tenant_id, **changed)


def _insert(connection: Connection, policy: QuotaPolicy) -> None:
    connection.execute(insert(_policies).values(**_columns(policy), id=policy.id, created_us=policy.created_us))
    if policy.scope == PLATFORM or METRICS[policy.metric].kind not in (Kind.RATE, Kind.CONCURRENCY):
        # These counters are per tenant or window. The first request that needs a counter creates it.
        return
    connection.execute(
        insert(_counters).values(
            policy_id=policy.id,
            subject_id=policy.subject_id,
            window_start_us=0,
            **Counter.fresh(policy.burst, policy.created_us)._asdict(),
        )
    )


def _change(connection: Connection, old: QuotaPolicy, new: QuotaPolicy) -> None:
    if METRICS[new.metric].kind is Kind.RATE and new.scope != PLATFORM:
        # Refill the bucket up to now at the old rate.
        mine = (_counters.c.policy_id == old.id) & (_counters.c.window_start_us == 0)
        query = select(_counters).where(mine).order_by(_counters.c.subject_id).with_for_update()
        for row in connection.execute(query).all():
            counter = Counter(row.level, row.reserved, row.used, row.exceeded, row.refilled_us)
            # With a limit of 0, the second call only lowers the level to the new burst.
            earned = counter.refilled(old.limit, old.burst, new.updated_us).refilled(0, new.burst, new.updated_us)
            changed = update(_counters).where(mine, _counters.c.subject_id == row.subject_id)
            connection.execute(changed.values(level=earned.level, refilled_us=earned.refilled_us))
    connection.execute(update(_policies).where(_policies.c.id == new.id).values(**_columns(new)))


def _columns(policy: QuotaPolicy) -> dict[str, Any]:
    return {
        "scope": policy.scope,
        "subject_id": policy.subject_id,
        "tenant_id": policy.tenant_id,
        "metric": policy.metric,
        "mode": policy.mode,
        "limit_value": policy.limit,
        "burst": policy.burst,
        "updated_us": policy.updated_us,
    }
