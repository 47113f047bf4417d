"""When the CPU kernels are compiled. What is compiled is compared in test_signatures.py."""

from __future__ import annotations

import multiprocessing
import multiprocessing.dummy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loramux.kernels.cpu import warm
from loramux.kernels.cpu.instructions import amx, compiled


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache directory, into which `main` compiles nothing. Returns the list of compilations."""
    made: list[str] = []
    monkeypatch.setattr(
        compiled, "_config", SimpleNamespace(CACHE_DIR=str(tmp_path / "numba-1f"), CPU_NAME=None, CPU_FEATURES=None)
    )
    monkeypatch.setattr(warm, "_compile", lambda: made.append("compiled"))

    def run(command: list[str], **_options: object) -> SimpleNamespace:
        assert command == [sys.executable, "-P", "-m", "loramux.kernels.cpu.warm", "--for-engine"]
        warm.main()
        return SimpleNamespace(returncode=0)

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


def permission_for_amx(monkeypatch: pytest.MonkeyPatch, _tmp_path: Path) -> None:
    """Or no longer a permission. Products with tiles are compiled only with it."""
    permitted = amx.has_amx()
    monkeypatch.setattr(warm, "has_amx", lambda: not permitted)


@pytest.mark.parametrize("change", [newer_source, other_cpu, other_features, permission_for_amx])
def test_kernels_are_compiled_again_where_numba_would_not_find_all(
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


@pytest.mark.usefixtures("compilations")
def test_an_engine_compiles_what_no_other_process_could(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[torch.dtype] = []
    monkeypatch.setattr(warm, "warm", warmed.append)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=-9))
    warm.compile_missing()
    assert warmed == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("is_chosen", [False, True])
def test_code_of_other_sources_is_deleted_unless_the_directory_was_chosen(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_chosen: bool
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    if is_chosen:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    old = tmp_path / "numba-0f"
    old.mkdir()
    warm.main()
    assert len(compilations) == 1
    assert old.exists() == is_chosen


def test_the_command_says_how_long_it_took(compilations: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    warm.main()
    said = r"compiling the CPU kernels, .* \.\.\.\nthe CPU kernels are compiled \(\d+\.\d s\)\n"
    assert re.fullmatch(said, capsys.readouterr().out)
    warm.main()
    assert capsys.readouterr().out == "the CPU kernels have been compiled\n"
    assert len(compilations) == 1


def test_two_processes_compile_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, a thread takes the place of the second process."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: multiprocessing.dummy)
    warmed: list[torch.dtype | str] = []
    monkeypatch.setattr(warm, "warm_base", warmed.append)
    monkeypatch.setattr(warm, "_warm_all_adapters", lambda: warmed.append("adapters"))
    warm._compile()
    assert {*warmed} == {*warm.DTYPES, "adapters"}
