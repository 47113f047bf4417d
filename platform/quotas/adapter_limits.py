"""The limits on what a tenant keeps, judged in the transaction that adds to it."""

from __future__ import annotations

from sqlalchemy import Connection

from loramux.platform.quotas.counter_rows import QuotaState
from loramux.platform.quotas.counters import Counter
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.quotas.policy_cache import PolicyBook
from loramux.platform.quotas.stock import stock_of


class AdapterLimits:
    """Refuses adapters, and bytes of them, beyond a tenant's hard limits; what goes beyond others is counted."""

    refusal = QuotaExceeded

    def admit(self, connection: Connection, tenant_id: str, metric: str, amount: int, now_us: int) -> None:
        """Let a tenant add `amount` adapters or bytes, or raise QuotaExceeded.

        The counters stay locked until the transaction ends, so that two that add at once take turns.
        """
        book = PolicyBook(0)
        book.read(connection, (tenant_id,), ())
        bindings = [binding for binding in book.stock_bindings(tenant_id) if binding.policy.metric == metric]
        if not bindings:
            return
        state = QuotaState(connection)
        state.make(bindings)
        state.read([binding.key for binding in bindings])
        stock = stock_of(connection, tenant_id, metric, now_us)
        standing = Counter(0, stock.reserved, stock.used, 0, 0)
        for binding in bindings:
            wait_us = binding.wait_us(standing, amount, now_us)
            if not wait_us:
                continue
            if binding.is_hard:
                raise QuotaExceeded(binding, wait_us)
            counter = state.counters.get(binding.key) or Counter.fresh(0, 0)
            state.change(binding.key, counter.changed(exceeded=1))
        state.write()
