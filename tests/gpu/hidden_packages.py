"""Hides installed packages from a process, so that it sees only those of a machine with a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.gpu.plan import PROVIDED, required

HIDE = """
from functools import partial
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
# Pytest keeps it as an attribute of a class, where a function would become a method.
PathFinder.find_spec = partial(lambda name, *rest: None if name.split(".")[0] in HIDDEN else find_spec(name, *rest))
"""


def hide_packages(folder: Path, packages: Iterable[str]) -> None:
    """Write a `sitecustomize.py` that hides all packages except loramux, torch, Triton, `packages`, and what these
    require.
    """
    provided = [Requirement(need).name for name in PROVIDED for need in distribution(name).requires or ()]
    visible = {"loramux", *PROVIDED, *required([*packages, *provided])}
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if not visible & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}
    }
    (folder / "sitecustomize.py").write_text(f"HIDDEN = {sorted(hidden)}\n{HIDE}")
