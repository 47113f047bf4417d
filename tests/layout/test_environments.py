"""`python -m tests.environments` with packages of an index in a folder."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.environments import Environment, create

STRANGER = Environment(folder=".venv-stranger", requirements={"tool": "tool.txt"}, pinned=("torch",))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose environment installs a package `stranger`, in version 1 or 2."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("1", "2"):
        information = f"stranger-{version}.dist-info"
        with zipfile.ZipFile(wheels / f"stranger-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: stranger\nVersion: {version}\n")
            wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    (tmp_path / "constraints.txt").write_text("torch==2.11.0\ntorchvision==1.0\nnumpy==2.4.0\n")
    (tmp_path / "tool.txt").write_text("stranger==1\n")
    return tmp_path


def installed(root: Path) -> str:
    python = root / ".venv-stranger" / "tool" / "bin" / "python"
    program = "from importlib.metadata import version; print(version('stranger'))"
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_environment_follows_its_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed install is tried again, and one without a change installs nothing."""
    wheels = os.environ["PIP_FIND_LINKS"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(root / "absent"))
    with pytest.raises(SystemExit, match="pip"):
        create(STRANGER, root)
    monkeypatch.setenv("PIP_FIND_LINKS", wheels)
    for version in ("1", "2"):
        (root / "tool.txt").write_text(f"stranger=={version}\n")
        create(STRANGER, root)
        assert installed(root) == version
    assert (root / ".venv-stranger" / "constraints.txt").read_text() == "torch==2.11.0\n"
    monkeypatch.setenv("PIP_FIND_LINKS", str(root / "absent"))
    create(STRANGER, root)
