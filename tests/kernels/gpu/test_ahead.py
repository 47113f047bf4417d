from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.kernels.gpu import ahead
from tests.engine.device.fake_gpu import fake_driver

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")

KEEP = "import os, sys; open(os.path.join(sys.argv[1], str(os.getpid())), 'w').write(sys.stdin.read())"
DIE_OF_B = "import sys; sys.exit('no space left' if 'b' in sys.stdin.read() else 0)"


def launch_two() -> None:
    from loramux.kernels.gpu.fused import silu_and_mul

    for dtype in (torch.float32, torch.bfloat16):
        silu_and_mul(torch.zeros(2, 64, dtype=dtype))


def test_each_program_goes_to_one_process(tmp_path: Path) -> None:
    assert ahead.compile_in_processes(list("abcdefg"), 3, [sys.executable, "-c", KEEP, str(tmp_path)]) == []
    assert sorted(path.read_text().split() for path in tmp_path.iterdir()) == [["a", "d", "g"], ["b", "e"], ["c", "f"]]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([sys.executable, "-c", DIE_OF_B], ["exit code 1: no space left"]),
        (["/no/such/program"], ["[Errno 2] No such file or directory: '/no/such/program'"] * 2),
    ],
    ids=["died", "never-began"],
)
def test_failed_process_is_reported(command: list[str], expected: list[str]) -> None:
    assert ahead.compile_in_processes(["a", "b"], 2, command) == expected


@pytest.mark.parametrize("num_cores", [1, 2])
def test_failed_processes_do_not_stop_the_engine_and_one_core_uses_none(
    num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with fake_driver(90):
        ahead.compile_ahead(launch_two, num_cores, [sys.executable, "-c", "import sys; sys.exit('no space left')"])
    told = capsys.readouterr().err.splitlines()
    if num_cores == 1:
        assert told == []
        return
    assert told[:2] == [
        f"compiling 2 of 2 GPU programs in 2 processes, into {tmp_path}",
        "2 of 2 compile processes failed (exit code 1: no space left); the engine will compile the missing programs",
    ]


def test_cached_programs_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead.Program, "is_cached", lambda self: self.source.signature["gate_up_ptr"] == "*fp32")
    with fake_driver(90):
        ahead.compile_ahead(launch_two, 2, ["/no/such/program"])
    assert capsys.readouterr().err == "", "a single missing program needs no second process"


def test_programs_that_the_engine_compiled_itself_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with fake_driver(90), ahead.recorded_programs() as lines:
        launch_two()
    first, second = map(ahead.Program.parse, lines)
    first.compile()
    with ahead.reported_programs():
        second.compile()
    with ahead.reported_programs():
        second.compile()
    took = r"loading GPU programs and capturing graphs took \d+\.\d s"
    missed = r"; 1 programs had not been compiled ahead: _gate \(1\)"
    assert re.fullmatch(f"{took}{missed}\n{took}\n", capsys.readouterr().err)


class Parsed:
    """A program that either fails to compile or records that it was compiled."""

    compiled: list[str]

    def __init__(self, line: str) -> None:
        self._line = line

    def compile(self) -> None:
        if self._line == "bad":
            raise ValueError("at 1:1:\nno such type")
        self.compiled.append(self._line)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> type[Parsed]:
    Parsed.compiled = []
    monkeypatch.setattr(ahead.Program, "parse", Parsed)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\nbad\ntwo\n"))
    return Parsed


def test_failed_program_does_not_stop_the_others(parsed: type[Parsed]) -> None:
    with pytest.raises(SystemExit, match="ValueError: no such type"):
        ahead.main()
    assert parsed.compiled == ["one", "two"]


def test_compiling_stops_if_the_engine_is_gone(parsed: type[Parsed], monkeypatch: pytest.MonkeyPatch) -> None:
    parents: Any = iter([7, 7, 1, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    ahead.main()
    assert parsed.compiled == ["one"]
