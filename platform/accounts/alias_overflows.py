"""The models that answer when an alias cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from sqlalchemy import select

from loramux.adapter_store.registry.records import DEFAULT_ALIAS
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_aliases, adapters, tenants
from loramux.platform.accounts.model_names import AdapterName, parse_adapter_name
from loramux.platform.accounts.principals import Principal

MAX_STALE_S = 5.0
"""Age up to which the overflows that were last read are used, in seconds."""


class AliasOverflows:
    """The overflows of all aliases, read together, because a server under overload cannot ask the database for each
    request that it refuses. Few aliases have one. `clock` returns seconds.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._read: tuple[float, Mapping[AdapterName, str]] | None = None
        self._reading = threading.Lock()

    @property
    def is_recent(self) -> bool:
        """True if `of` does not block."""
        return self._read is not None and self._clock() - self._read[0] < MAX_STALE_S

    def of(self, principal: Principal, model: str) -> str | None:
        """Return the overflow of the alias that a caller names, or None. Blocks unless `is_recent`."""
        name = parse_adapter_name(model)
        if name is None or name.version is not None or name.digest_prefix is not None:
            return None
        if not self.is_recent:
            self._refresh()
        assert self._read is not None
        tenant, alias = name.tenant or principal.tenant_slug, name.alias or DEFAULT_ALIAS
        return self._read[1].get(AdapterName(tenant, name.adapter, alias=alias))

    def _refresh(self) -> None:
        """Read all overflows on one thread at a time. The other threads use the last ones until then."""
        if not self._reading.acquire(blocking=self._read is None):
            return
        try:
            if not self.is_recent:
                self._read = self._clock(), self._all()
        finally:
            self._reading.release()

    def _all(self) -> Mapping[AdapterName, str]:
        aliases = adapter_aliases.c
        query = (
            select(tenants.c.slug, adapters.c.name, aliases.name, aliases.overflow)
            .join(adapters, adapters.c.id == aliases.adapter_id)
            .join(tenants, tenants.c.id == adapters.c.tenant_id)
            .where(aliases.overflow.is_not(None))
        )
        with self._database.read() as connection:
            return {
                AdapterName(slug, name, alias=alias): model for slug, name, alias, model in connection.execute(query)
            }
