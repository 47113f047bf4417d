"""Tensor-parallel engines on the GPU's path choose the tokens of an engine with one worker.

Without GPUs, gloo takes the place of NCCL, and a replayed graph runs its step again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loramux.engine.loop.engine import Engine
from loramux.engine.parallel import workers
from loramux.engine.protocol.messages import SamplingParams, StatsRequest
from tests.conformance.gpu_worker import FREE_BYTES, recording_backend
from tests.conformance.parity import Subject, load, make_subject
from tests.conformance.test_gpu_engine import GREEDY, OUTER_PLANS, PLANS, requests_of, tokens_of
from tests.conformance.test_tensor_parallel import END_S
from tests.conformance.tiny_models import SMALL_SHAPE, SMALL_WINDOW
from tests.kernels.gpu.interpreted import HAS_GPU

SHAPE = {**SMALL_SHAPE, "num_hidden_layers": 2}
LIMITS = {"max_batch_tokens": 32, "max_sequences": 8}


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(one, marks=pytest.mark.campaign) for one in ("qwen3-moe", "gemma3"))],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    outer = [plan for plan in OUTER_PLANS if plan.name != "r3"]
    return make_subject(request.param, tmp_path_factory.mktemp(request.param), [*PLANS, *outer], SHAPE, SMALL_WINDOW)


def tokens_with(engine: Engine, subject: Subject, sampling: SamplingParams) -> dict[str, list[int]]:
    """The tokens of a mixed batch, whose prompts are shorter and longer than a step's budget."""
    wanted = [(None, 5), ("r3", 17), ("r31", 1), ("by-layer", 36), ("head", 3), ("both", 9)]
    return tokens_of(engine, [add for _, add in requests_of(subject, wanted, sampling, num_tokens=6).values()])


@pytest.mark.skipif(HAS_GPU, reason="gloo stands for NCCL, which needs a GPU for each worker")
@pytest.mark.parametrize("kernels", ["reference", pytest.param("gpu", marks=pytest.mark.campaign)])
def test_tokens_equal_those_of_one_worker(
    subject: Subject, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "END_S", END_S)
    path = tmp_path / "exchanges"
    command = (sys.executable, "-m", "tests.conformance.gpu_worker", kernels, str(path))
    monkeypatch.setattr(workers, "WORKER_COMMAND", command)
    lines: list[str] = []
    backend = recording_backend(kernels, 0, lines.append, monkeypatch)
    # The reference's sampler is always greedy.
    samplings = [GREEDY, SamplingParams(temperature=0.8, seed=5, ignore_eos=True)][: 1 + (kernels == "gpu")]
    found, num_graphs = [], []
    for size in (1, 2):
        lines.clear()
        assembled = subject.assemble(backend, tensor_parallel_size=size, num_threads=size, pool_bytes=None, **LIMITS)
        load(assembled.engine, subject.digests.values())
        found.append([tokens_with(assembled.engine, subject, sampling) for sampling in samplings])
        assembled.engine.check_integrity()
        stats = assembled.engine.stats(StatsRequest(call_id=""))
        assert stats.max_adapters_in_step >= 3
        num_graphs.append(stats.graphs.num_graphs)
        pages = assembled.views.raw
        assembled.close()
    assert found[0] == found[1]
    assert num_graphs[0] == num_graphs[1] > 0
    # Half of the adapters' and heads' pages, in a pool for which both devices have room.
    assert pages.nbytes == (FREE_BYTES[1] - (2 << 30)) // pages[0].nbytes * pages[0].nbytes
    assert path.read_text().splitlines() == lines
    assert {line.split(" ")[0] for line in lines} == {"sum", "join_columns", "broadcast", "capture"}
