"""One load of an adapter, for all who wait for it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from loramux.adapter_store.errors import AdapterCorrupt, AdapterUnavailable
from loramux.adapter_store.formats.packing import PackedAdapter


@dataclass(slots=True, eq=False)
class SharedLoad:
    """Guarded by the lock of the store that runs it."""

    waiters: set[threading.Event] = field(default_factory=set)
    """Each is set once the load is through; who leaves before that takes its own away."""
    is_through: bool = False
    packed: PackedAdapter | None = None
    error: BaseException | None = None
    num_reserved_bytes: int = 0

    @property
    def is_wanted(self) -> bool:
        return bool(self.waiters)

    def result(self) -> PackedAdapter:
        """What came of a load that is through. Raises AdapterUnavailable or AdapterCorrupt."""
        if self.packed is not None:
            return self.packed
        # Each waiter raises its own exception: a traceback belongs to one thread.
        if isinstance(self.error, AdapterCorrupt):
            raise AdapterCorrupt(str(self.error)) from self.error
        raise AdapterUnavailable(str(self.error)) from self.error
