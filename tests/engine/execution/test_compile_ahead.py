from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.decoder.weights import WeightSource
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.machine_limits import num_cpus
from tests.engine.device.fake_gpu import (
    GEMMA,
    GEMMA_MIXTURE,
    HYBRID,
    LLAMA,
    MIMO,
    MIXTURE,
    CodedZeroWeights,
    UnlaunchedProgram,
    cache_key,
    fake_driver,
    start_engine,
)
from tests.engine.device.gpu_backend import has_fp8_products

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")


COMPILE = """
import sys
from pathlib import Path
from triton import knobs
from triton.runtime import JITFunction
from loramux.kernels.gpu.ahead import compile_ahead
from tests.engine.device.fake_gpu import GEMMA, HYBRID, LLAMA, MIXTURE, CodedZeroWeights, fake_driver, start_engine

run = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
found = []
knobs.compilation.listener = lambda **said: found.append(said["cache_hit"])
model, capability, directory = sys.argv[1:]
models = {"llama": LLAMA, "gemma": GEMMA, "mixture": MIXTURE, "hybrid": HYBRID, "quantized": MIXTURE}
weights = CodedZeroWeights() if model == "quantized" else None
for _ in range(2):
    with fake_driver(int(capability)):
        start_engine(Path(directory), models[model], compile_ahead, weights=weights).adapters.close()
assert all(found), f"{found.count(False)} of {len(found)} programs were compiled by the engine"
print(len(found))
"""


@pytest.mark.campaign
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("model", ["llama", "gemma", "mixture", "hybrid", "quantized"])
def test_engine_start_after_compiling_ahead_compiles_nothing(model: str, capability: int, tmp_path: Path) -> None:
    """The first start compiles ahead and then loads every program. The second start compiles nothing."""
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path / "programs"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, model, str(capability), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_programs = int(done.stdout) // 2
    first, last = done.stderr.splitlines()
    assert first.startswith(f"compiling {num_programs} of {num_programs} GPU programs in ")
    assert last.startswith("compiling ahead took ")


def cases() -> Iterator[Any]:
    models = {
        "llama": (LLAMA, None, 12),
        "gemma": (GEMMA, None, 12),
        "mixture": (MIXTURE, None, 17),
        "quantized": (MIXTURE, CodedZeroWeights(), 18),
        "hybrid": (HYBRID, None, 16),
    }
    for version, names_target in {"triton-3.7": True, "triton-3.6": False}.items():
        for name, model in models.items():
            marks = () if name == "llama" and names_target else pytest.mark.campaign
            yield pytest.param(*model, names_target, {}, id=f"{version}-{name}", marks=marks)
    # Steps of one sequence launch every kernel too. The quantised model has experts.
    for name, names_target in {"llama": False, "gemma": True, "quantized": True}.items():
        yield pytest.param(*models[name], names_target, {"max_sequences": 1}, id=f"one-sequence-{name}")
    # Each of its experts has a scale.
    yield pytest.param(GEMMA_MIXTURE, None, 17, True, {"max_sequences": 1}, id="gemma-mixture")
    # The base's own head for drafts launches the kernels of the base, some of them with other shapes.
    yield pytest.param(MIMO, None, 12, True, {"speculate": "head", "max_sequences": 2}, id="head")
    # Steps that are not captured gather pages for prefills. Those of 512 rows dequantise weights or round inputs.
    num_kernels = 16 + has_fp8_products(torch.device("cpu"))
    yield pytest.param(
        LLAMA, CodedZeroWeights(), num_kernels, True, {"max_batch_tokens": 1040, "max_sequences": 1}, id="large-steps"
    )


@pytest.mark.parametrize(("model", "weights", "num_kernels", "names_target", "limits"), list(cases()))
def test_recorded_programs_match_the_warm_up(
    model: dict[str, Any],
    weights: WeightSource | None,
    num_kernels: int,
    names_target: bool,
    limits: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program has the same cache key whether it is recorded or launched. Recording skips layers, and JSON has no
    tuples.
    """
    from triton import compiler
    from triton.runtime import jit

    from loramux.kernels.gpu.ahead import Program, recorded_programs

    wanted: dict[str, object] = {}
    recorded: dict[str, object] = {}
    captured: list[Callable[[], None]] = []

    def note(source: Any, target: Any, options: dict[str, Any]) -> UnlaunchedProgram:
        wanted[cache_key(source, target, options)] = source.signature, source.constants, source.attrs
        return UnlaunchedProgram()

    def record(launch: Callable[[], None], num_processes: int) -> None:
        with recorded_programs() as lines, monkeypatch.context() as patched:
            patched.setattr(torch, "empty", poisoned)
            launch()
        assert not wanted, "a program was launched instead of compiled ahead"
        assert not captured, "a step without launches needs no graph"
        for program in map(Program.parse, lines):
            source = program.source
            key = cache_key(source, program.target, program.options)
            recorded[key] = source.signature, source.constants, source.attrs

    def poisoned(*arguments: Any, **named: Any) -> torch.Tensor:
        """Uninitialised memory, in which no integer is a valid index."""
        tensor = empty(*arguments, **named)
        return tensor.fill_(2**30) if tensor.dtype is torch.int32 else tensor

    def capture(self: HostAccelerator, step: Callable[[], None]) -> Callable[[], None]:
        captured.append(step)
        return step

    def without_target(*arguments: Any, **named: Any) -> str:
        program = json.loads(serialize(*arguments, **named))
        program.pop("target", None)
        return json.dumps(program)

    empty = torch.empty
    serialize = jit.serialize_specialization_data
    if not names_target:
        monkeypatch.setattr(jit, "serialize_specialization_data", without_target)
    monkeypatch.setattr(compiler, "compile", note)
    monkeypatch.setattr(HostAccelerator, "capture", capture)
    with fake_driver(90):
        start_engine(tmp_path, model, record, weights=weights, **limits).adapters.close()
    assert len({name.rpartition("-")[0] for name in wanted}) == num_kernels
    assert recorded == wanted
    assert captured


def test_engine_starts_even_if_compiling_ahead_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from triton import compiler

    compiled: list[str] = []

    def note(source: Any, target: Any, options: dict[str, Any]) -> UnlaunchedProgram:
        compiled.append(source.name)
        return UnlaunchedProgram()

    def refuse(launch: Callable[[], None], num_processes: int) -> None:
        assert num_processes == num_cpus()
        raise OSError("no room for a cache")

    monkeypatch.setattr(compiler, "compile", note)
    with fake_driver(90):
        start_engine(tmp_path, LLAMA, refuse, max_sequences=1).adapters.close()
    assert compiled
    assert "compiling GPU programs one at a time: OSError('no room for a cache')" in capsys.readouterr().err
