from __future__ import annotations

import subprocess
import sys

from loramux.platform.cluster.engine_replica import EngineReplica
from loramux.platform.cluster.spare_worker import PRELOADED


def test_a_process_in_reserve_has_imported_the_class_of_replicas() -> None:
    (modules,) = PRELOADED.values()
    assert EngineReplica.__module__ in modules.split(",")


def test_a_replica_imports_only_what_it_uses() -> None:
    # The modules of a database take half a second, which a replacement of a dead replica would take longer.
    unused = ("torch", "sqlalchemy", "alembic", "fastapi")
    module = "loramux.platform.cluster.engine_replica"
    code = f"import sys, {module}; print([name for name in {unused} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
