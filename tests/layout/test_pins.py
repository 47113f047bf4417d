"""All packages installed by `make venv` are pinned. All except torch and triton are also verified by hash."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from loramux.platform.cluster.ray_connection import RAY_VERSION

ROOT = Path(__file__).parents[2]
IMAGE_LOCK = "platform/deploy/container/requirements.lock"
RAY_LOCK = "platform/deploy/container/ray.lock"
UNHASHED = {"torch", "triton"}
"""Packages whose builds differ between machines."""


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, _, version in (line.partition("==") for line in lines)}


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """Return each package's version and hashes. Fail on any other line, such as an index option."""
    found = {}
    for entry in (ROOT / name).read_text().replace(" \\\n", "").splitlines():
        pin, *hashes = entry.split("    --hash=sha256:")
        match = re.fullmatch(r"([a-z0-9-]+)==([a-z0-9.]+)", pin)
        assert match, pin
        assert all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes), pin
        found[match[1]] = (match[2], hashes)
    return found


def test_gpu_constraints_differ_only_in_triton() -> None:
    everywhere, with_gpu = pins("constraints.txt"), pins("constraints-cuda.txt")
    assert everywhere.keys() - with_gpu.keys() == {"triton"}
    assert with_gpu.items() <= everywhere.items()


def test_every_pin_except_torch_and_triton_is_hashed() -> None:
    here, in_browser = locked("constraints.lock"), locked("constraints-browser.lock")
    assert here.keys() & in_browser.keys() == set()
    versions = {name: version for name, (version, _) in (here | in_browser).items()}
    assert versions == {name: version for name, version in pins("constraints.txt").items() if name not in UNHASHED}
    assert all(hashes for _, hashes in (here | in_browser).values())


def test_image_has_the_pinned_packages() -> None:
    assert locked(IMAGE_LOCK).items() <= locked("constraints.lock").items()


def test_ray_adds_hashed_packages_to_the_image() -> None:
    added, image = locked(RAY_LOCK), locked(IMAGE_LOCK)
    assert added["ray"][0] == RAY_VERSION
    assert added.keys() & image.keys() == set()
    assert all(hashes for _, hashes in added.values())
    everywhere = pins("constraints.txt")
    assert all(everywhere.get(name, version) == version for name, (version, _) in added.items())


@pytest.mark.parametrize(("lock", "extras"), [("constraints.lock", {"demo", "dev"}), (IMAGE_LOCK, {"traces"})])
def test_all_dependencies_are_locked(lock: str, extras: set[str]) -> None:
    """The lock covers all direct and indirect dependencies, except packages that only torch needs."""
    seen: set[str] = set()
    waiting = [("loramux", frozenset(extras))]
    while waiting:
        name, of_name = waiting.pop()
        for text in distribution(name).requires or ():
            needed = Requirement(text)
            markers = [{"extra": extra} for extra in (*of_name, "")]
            is_needed = needed.marker is None or any(needed.marker.evaluate(marker) for marker in markers)
            package = canonicalize_name(needed.name)
            if is_needed and package not in seen | UNHASHED:
                seen.add(package)
                waiting.append((package, frozenset(needed.extras)))
    assert seen <= locked(lock).keys()


@pytest.mark.parametrize("target", ["venv", "test-browser"])
def test_modified_wheel_is_refused(tmp_path: Path, target: str) -> None:
    """With the Makefile's flags and the lock's hashes, pip refuses a changed wheel from any index."""
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", target, f"VENV={tmp_path}/venv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    installs = [line.split("pip install", 1)[1].split() for line in planned.splitlines() if "pip install" in line]
    flags = [install for install in installs if "--require-hashes" in install][-1]
    lock = ROOT / flags[flags.index("-r") + 1]
    name, (version, _) = next(iter(locked(lock.name).items()))
    entry = tmp_path / "requirements.txt"
    entry.write_text(re.search(rf"(?m)^{name}==.*(\n    --hash.*)+", lock.read_text())[0] + "\n")  # type: ignore[index]
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\n")
    flags[flags.index("-r") + 1] = str(entry)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", *flags],
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr, done.stderr


def test_environment_keeps_python_and_constraints_until_make_clean(tmp_path: Path) -> None:
    """Other values are refused with the fix. By default, targets use the values that created the environment."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "constraints-cuda.txt", "constraints.lock"):
        (tmp_path / name).touch()
    python = tmp_path / "python"
    # The fake Python creates an environment that contains only itself, and ignores every other call.
    python.write_text('#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi\n')
    python.chmod(0o755)
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHON", "CONSTRAINTS", "MAKEFLAGS")
    }

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", *arguments], cwd=tmp_path, env=inherited, capture_output=True, text=True)

    cuda = "CONSTRAINTS=constraints-cuda.txt"
    assert "-c constraints-cuda.txt" in make("venv", f"PYTHON={python}", cuda).stdout
    for arguments in ([], [f"PYTHON={python}", cuda]):
        assert "Nothing to be done" in make("venv", *arguments).stdout
    refused = make("venv", "CONSTRAINTS=constraints.txt")
    assert refused.returncode == 2
    assert f"PYTHON={python} {cuda}: run 'make clean' first" in refused.stderr
    # Without CONSTRAINTS, a target reinstalls with the same constraints.
    os.utime(tmp_path / "pyproject.toml", (time.time() + 60,) * 2)
    assert "-c constraints-cuda.txt" in make("--dry-run", "check").stdout
    assert make("clean", "CONSTRAINTS=constraints.txt").returncode == 0
    assert "-c constraints.txt" in make("venv", f"PYTHON={python}").stdout
