"""The environment of `make test-cluster`, which has Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-cluster" / "bin" / "python"


def enter_environment(module: str, arguments: Sequence[str]) -> None:
    """If this process has no Ray, replace it by one that has, and that runs `module` with these arguments."""
    if find_spec("ray") is None:
        subprocess.run([sys.executable, "-m", "tests.environments", "cluster"], cwd=ROOT, check=True)
        os.execv(PYTHON, [str(PYTHON), "-m", module, *arguments])
