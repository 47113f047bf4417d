"""Downloads of other projects' sdists, without running any of their code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

BACKEND = Path(__file__).with_name("inert_backend.py")
BACKENDS = ("setuptools/build_meta.py", "hatchling/build.py")
"""The modules that the sdists name as their build backends."""


def unpacked(requirement: str, patterns: Sequence[str], folder: Path, index: Sequence[str] = ()) -> Path:
    """Return a directory with the files of an sdist that match one of the patterns. Download it if it is missing.

    `requirement` is `NAME==VERSION`, and `index` contains pip's options for another index. Patterns and the returned
    directory start below the sdist's own top directory.
    """
    # PYTHONPATH will contain a directory below this one, and pip builds in another working directory.
    folder = folder.resolve()
    name, _, version = requirement.partition("==")
    # Other patterns need another directory.
    made = folder / f"{name}-{version}-{zlib.crc32(repr(patterns).encode()):08x}"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            archive = _downloaded(requirement, Path(scratch), index)
            unpacking = Path(scratch) / "unpacked"
            _unpack(archive, patterns, unpacking)
            unpacking.rename(made)
    return made


def _downloaded(requirement: str, folder: Path, index: Sequence[str]) -> Path:
    """pip asks an sdist's build backend for its metadata. An inert backend answers with the PKG-INFO of the sdist."""
    backends, files = folder / "backends", folder / "files"
    for name in BACKENDS:
        module = backends / name
        module.parent.mkdir(parents=True, exist_ok=True)
        (module.parent / "__init__.py").touch()
        shutil.copyfile(BACKEND, module)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", *index]
    command += ["--no-binary", ":all:", "--dest", str(files), requirement]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(backends)}, check=True)
    (archive,) = files.iterdir()
    return archive


def _unpack(archive: Path, patterns: Sequence[str], out: Path) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            path = member.name.partition("/")[2]
            if member.isfile() and any(fnmatch(path, pattern) for pattern in patterns):
                opened.extract(member.replace(name=path), out, filter="data")
