from __future__ import annotations

import gc
import weakref

from loramux.engine.server.gc_freeze import freeze_gc


class Node:
    """A reference cycle, which only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_existing_objects_are_frozen_and_new_ones_are_collected() -> None:
    there = Node()
    is_there = weakref.ref(there)
    gone = weakref.ref(Node())
    freeze_gc()
    try:
        assert gone() is None, "earlier garbage is not kept"
        assert gc.get_freeze_count() > 10_000
        del there
        later = weakref.ref(Node())
        gc.collect()
        assert is_there() is not None, "frozen objects are not collected"
        assert later() is None
    finally:
        gc.unfreeze()
    gc.collect()
    assert is_there() is None
    # Imported modules stay frozen during all tests.
    gc.freeze()
