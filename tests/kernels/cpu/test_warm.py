"""When the CPU kernels are compiled. What is compiled is compared in test_signatures.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from loramux.kernels.cpu import warm
from loramux.kernels.cpu.instructions import compiled


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache directory, into which `main` compiles nothing. Returns the list of compilations."""
    made: list[str] = []
    monkeypatch.setattr(compiled, "_config", SimpleNamespace(CACHE_DIR=str(tmp_path), CPU_NAME=None, CPU_FEATURES=None))
    monkeypatch.setattr(warm, "_compile", lambda: made.append("compiled"))
    monkeypatch.setattr(warm, "FOLDER", tmp_path)

    def run(command: list[str], **_options: object) -> None:
        assert command == [sys.executable, "-P", "-m", "loramux.kernels.cpu.warm"]
        warm.main()

    monkeypatch.setattr(subprocess, "run", run)
    return made


def test_the_first_engine_compiles_the_kernels(compilations: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    warm.compile_missing()
    assert len(compilations) == 1
    assert "compiling the CPU kernels" in capsys.readouterr().err
    warm.compile_missing()
    assert len(compilations) == 1
    assert capsys.readouterr().err == ""


def newer_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.touch()
    monkeypatch.setattr(compiled, "_sources", lambda: [source])
    warm.main()
    os.utime(source, ns=(0, 0))


def other_cpu(monkeypatch: pytest.MonkeyPatch, _tmp_path: Path) -> None:
    monkeypatch.setattr(compiled._config, "CPU_NAME", "generic")


def other_features(monkeypatch: pytest.MonkeyPatch, _tmp_path: Path) -> None:
    monkeypatch.setattr(compiled._config, "CPU_FEATURES", "+avx2")


@pytest.mark.parametrize("change", [newer_source, other_cpu, other_features])
def test_kernels_are_compiled_again_where_numba_would_not_find_them(
    compilations: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    warm.main()
    warm.main()
    assert len(compilations) == 1
    change(monkeypatch, tmp_path)
    before = len(compilations)
    warm.compile_missing()
    assert len(compilations) == before + 1


def test_a_failed_compilation_is_repeated(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(warm, "_compile", lambda: sys.exit("no memory"))
        with pytest.raises(SystemExit):
            warm.main()
    warm.compile_missing()
    assert len(compilations) == 1


def test_compiled_code_of_other_sources_is_deleted(compilations: list[str], tmp_path: Path) -> None:
    old = tmp_path / "__pycache__" / "numba-0f"
    old.mkdir(parents=True)
    warm.main()
    assert len(compilations) == 1
    assert not old.exists()
