"""Runs programs and loramux's own tests with the extensions in a directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(site: Path, **variables: str) -> dict[str, str]:
    """Return an environment in which packages are also imported from `site`, without settings of a server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}
    paths = os.pathsep.join([str(site), str(ROOT / ".src"), *(path for path in sys.path if path)])
    return {**kept, "PYTHONPATH": paths, "XDG_CONFIG_HOME": str(site), "LORAMUX_NUM_THREADS": "1", **variables}


def own_tests(site: Path, path: str, **variables: str) -> int:
    """Run the tests of one kind against the extensions in `site`, and return their number."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "extension", path]
    done = subprocess.run(
        command, env=environment(site, **variables), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None, done.stdout
    assert "skipped" not in done.stdout
    return int(found[1])
