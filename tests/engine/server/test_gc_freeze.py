from __future__ import annotations

import subprocess
import sys

# A process of its own has few objects, so that collections are quick.
PROGRAM = """
import gc
import weakref

from loramux.engine.server.gc_freeze import THRESHOLDS, freeze_gc


class Node:
    def __init__(self):
        # Only the garbage collector can free a cycle.
        self.itself = self


there = Node()
is_there = weakref.ref(there)
gone = weakref.ref(Node())
gc.disable()
freeze_gc()
assert gc.isenabled()
assert gone() is None, "earlier garbage is not kept"
assert gc.get_threshold() == THRESHOLDS
assert gc.get_freeze_count() > 1_000
del there
later = weakref.ref(Node())
gc.collect()
assert is_there() is not None, "frozen objects are not collected"
assert later() is None
gc.unfreeze()
gc.collect()
assert is_there() is None
"""


def test_existing_objects_are_frozen_and_new_ones_are_collected() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
