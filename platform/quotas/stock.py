"""A tenant's stock (the number and bytes of its adapters, and the bytes of its stored answers) and the limits on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from loramux.adapter_store.ingest.open_uploads import open_uploads_of
from loramux.adapter_store.registry.records import UNFINISHED
from loramux.migrations import schema
from loramux.platform.quotas.counter_rows import CounterRows
from loramux.platform.quotas.counters import Counter
from loramux.platform.quotas.decisions import PolicyVerdict, QuotaExceeded
from loramux.platform.quotas.metrics import ADAPTERS, STORED_BYTES
from loramux.platform.quotas.policy_cache import PolicyCache
from loramux.platform.quotas.rules import Binding

_adapters, _versions, _uploads = schema.adapters, schema.adapter_versions, schema.uploads
_files = schema.adapter_version_files


@dataclass(frozen=True, slots=True)
class Stock:
    """A tenant's number of adapters, of adapter bytes or of stored bytes, as counted in the database."""

    used: int
    reserved: int = 0
    """Bytes declared by open uploads. They move to `used` when an upload becomes a version."""


def stock_of(connection: Connection, tenant_id: str, metric: str, now_us: int) -> Stock:
    """Return a tenant's stock at `now_us`.

    Stored responses and chat completions count as they are stored, and conversations before compression. The bytes of a
    version are its canonical bytes plus its optional files. Until the version is ready or rejected, they are the bytes
    that its upload declared.
    """
    if metric == STORED_BYTES:
        table = schema.stored_bytes.c
        return Stock(connection.execute(select(table.num_bytes).where(table.tenant_id == tenant_id)).scalar() or 0)
    if metric == ADAPTERS:
        query = select(func.count()).select_from(_adapters).where(_adapters.c.tenant_id == tenant_id)
        return Stock(int(connection.execute(query).scalar_one()))
    of_tenant = _versions.join(_adapters, _adapters.c.id == _versions.c.adapter_id)
    # An accepted version has its sizes already while its blobs are stored, and is not ready yet.
    is_validated = (_adapters.c.tenant_id == tenant_id, _versions.c.state.not_in(UNFINISHED))
    known = select(func.coalesce(func.sum(_versions.c.canonical_bytes), 0)).select_from(of_tenant)
    num_bytes = int(connection.execute(known.where(*is_validated)).scalar_one())
    further = select(func.coalesce(func.sum(_files.c.size), 0)).select_from(
        of_tenant.join(_files, _files.c.version_id == _versions.c.id)
    )
    num_bytes += int(connection.execute(further.where(*is_validated)).scalar_one())
    announced = (
        select(_uploads.c.files)
        .select_from(of_tenant.join(_uploads, _uploads.c.id == _versions.c.upload_id))
        .where(_adapters.c.tenant_id == tenant_id, _versions.c.state.in_(UNFINISHED))
    )
    num_bytes += sum(int(file["size"]) for (files,) in connection.execute(announced) for file in files)
    return Stock(num_bytes, open_uploads_of(connection, tenant_id, now_us).num_bytes)


class StockLimits:
    """Enforces a tenant's hard limits on its stock, and counts additions that exceed soft or shadow limits."""

    refusal = QuotaExceeded

    def check(self, connection: Connection, tenant_id: str, metric: str, amount: int, now_us: int) -> None:
        """Raise QuotaExceeded if a tenant cannot add `amount` now. Nothing is locked or counted."""
        bindings = [binding for binding in _bindings(connection, tenant_id, metric) if binding.is_hard]
        if bindings:
            _refuse(bindings, _standing(connection, tenant_id, metric, now_us), amount, now_us)

    def admit(self, connection: Connection, tenant_id: str, metric: str, amount: int, now_us: int) -> None:
        """Let a tenant add `amount` adapters or bytes, or raise QuotaExceeded.

        The counters stay locked until the transaction ends, so that concurrent additions take turns.
        """
        bindings = _bindings(connection, tenant_id, metric)
        if not bindings:
            return
        rows = CounterRows(connection)
        rows.make(bindings)
        rows.read([binding.key for binding in bindings])
        standing = _standing(connection, tenant_id, metric, now_us)
        for binding in _refuse(bindings, standing, amount, now_us):
            counter = rows.counters.get(binding.key) or Counter.fresh(0, 0)
            rows.change(binding.key, counter.changed(exceeded=1))
        rows.write()


def _bindings(connection: Connection, tenant_id: str, metric: str) -> list[Binding]:
    cache = PolicyCache(0)
    cache.read(connection, (tenant_id,), ())
    return [binding for binding in cache.stock_bindings(tenant_id) if binding.policy.metric == metric]


def _standing(connection: Connection, tenant_id: str, metric: str, now_us: int) -> Counter:
    stock = stock_of(connection, tenant_id, metric, now_us)
    return Counter(0, stock.reserved, stock.used, 0, 0)


def _refuse(bindings: Sequence[Binding], standing: Counter, amount: int, now_us: int) -> list[Binding]:
    """Raise QuotaExceeded for a hard limit that would be exceeded. Return the others that would be."""
    exceeded = [(binding, binding.wait_us(standing, amount, now_us)) for binding in bindings]
    for binding, wait_us in exceeded:
        if wait_us and binding.is_hard:
            raise QuotaExceeded(PolicyVerdict(binding, standing, amount, False, wait_us))
    return [binding for binding, wait_us in exceeded if wait_us]
