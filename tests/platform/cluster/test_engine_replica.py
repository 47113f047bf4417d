from __future__ import annotations

import subprocess
import sys


def test_a_replica_imports_only_what_it_uses() -> None:
    # The modules of a database take half a second, which a replacement of a dead replica would take longer.
    unused = ("torch", "sqlalchemy", "alembic", "fastapi")
    module = "loramux.platform.cluster.engine_replica"
    code = f"import sys, {module}; print([name for name in {unused} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
