"""Tensor-parallel engines on the GPU's path choose the tokens of an engine with one worker.

Gloo takes the place of NCCL, which would need a GPU for each worker. Without a GPU, the GPU's kernels are interpreted,
and a replayed graph runs its step again. With one, two workers share it, and nothing is captured.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loramux.engine.loop.engine import Engine
from loramux.engine.parallel import workers
from loramux.engine.protocol.messages import SamplingParams, StatsRequest
from tests.conformance.gpu_worker import CACHED_BYTES, FREE_BYTES, recording_backend
from tests.conformance.parity import Subject, load, make_subject
from tests.conformance.test_gpu_engine import GREEDY, OUTER_PLANS, PLANS, requests_of, tokens_of
from tests.conformance.test_tensor_parallel import END_S, assembled
from tests.conformance.tiny_models import SMALL_SHAPE, SMALL_WINDOW
from tests.kernels.gpu.interpreted import FOR_GPUS, HAS_GPU

SHAPE = {**SMALL_SHAPE, "num_hidden_layers": 2}
LIMITS = {"max_batch_tokens": 16, "max_sequences": 4}


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(one, marks=pytest.mark.campaign) for one in ("qwen3-moe", "gemma3"))],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    outer = [plan for plan in OUTER_PLANS if plan.name != "r3"]
    return make_subject(request.param, tmp_path_factory.mktemp(request.param), [*PLANS, *outer], SHAPE, SMALL_WINDOW)


def tokens_with(engine: Engine, subject: Subject, sampling: SamplingParams) -> dict[str, list[int]]:
    """The tokens of a mixed batch, whose prompts are shorter and longer than a step's budget."""
    wanted = [("r3", 5), (None, 3), ("by-layer", 18), ("both", 2), ("head", 1)]
    return tokens_of(engine, [add for _, add in requests_of(subject, wanted, sampling, num_tokens=4).values()])


@pytest.mark.parametrize("kernels", ["reference", pytest.param("gpu", marks=FOR_GPUS)])
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
    sampling = SamplingParams(temperature=0.8, seed=5, ignore_eos=True) if kernels == "gpu" else GREEDY
    is_simulated = kernels == "reference" or not HAS_GPU
    pool_bytes = None if is_simulated else 96 << 20
    found, num_graphs = [], []
    for size in (1, 2):
        lines.clear()
        settings = {"tensor_parallel_size": size, "num_threads": size, "pool_bytes": pool_bytes}
        with assembled(subject, backend=backend, **settings, **LIMITS) as parts:
            load(parts.engine, subject.digests.values())
            found.append(tokens_with(parts.engine, subject, sampling))
            parts.engine.check_integrity()
            stats, pages = parts.engine.stats(StatsRequest(call_id="")), parts.views.raw
        assert stats.max_adapters_in_step >= 3
        num_graphs.append(stats.graphs.num_graphs)
    assert found[0] == found[1]
    assert path.read_text().splitlines() == lines
    assert {"sum", "join_columns", "broadcast"} <= {line.split(" ")[0] for line in lines}
    if not is_simulated:
        return
    assert num_graphs[0] == num_graphs[1] == lines.count("capture") > 0
    # Half of the adapters' and heads' pages, in a pool for which both devices have room, beside what each of them will
    # cache.
    room = FREE_BYTES[1] - (2 << 30) - (CACHED_BYTES if kernels == "reference" else 0)
    assert pages.nbytes == room // pages[0].nbytes * pages[0].nbytes
