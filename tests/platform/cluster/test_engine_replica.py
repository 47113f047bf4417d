from __future__ import annotations

import subprocess
import sys

from loramux.platform.cluster.spare_worker import PRELOADED


def test_a_process_in_reserve_runs_the_loramux_that_is_installed_when_it_becomes_a_replica() -> None:
    (modules,) = PRELOADED.values()
    assert not [name for name in modules.split(",") if name.startswith("loramux")]


def test_a_replica_imports_only_what_it_uses() -> None:
    # The modules of a database take half a second, which a replacement of a dead replica would take longer.
    unused = ("torch", "sqlalchemy", "alembic")
    module = "loramux.platform.cluster.engine_replica"
    code = f"import sys, {module}; print([name for name in {unused} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
