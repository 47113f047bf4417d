from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from loramux.kernels.tables import AdapterTables, AttentionBatch, Segments
from tests.kernels.gpu.interpreted import DEVICE, HAS_GPU, run_interpreted
from tests.kernels.layer_step import (
    GEOMETRY,
    HIDDEN,
    STEPS,
    Step,
    Weights,
    both_sides,
    overwrite,
    padded,
    run,
    step_of,
)


@pytest.mark.parametrize(
    ("num_tokens", "steps"),
    # A mixed step takes 15 seconds in the interpreter.
    [
        pytest.param(*step, id=name, marks=pytest.mark.campaign if name == "mixed" and not HAS_GPU else ())
        for name, step in STEPS.items()
    ],
)
def test_replayed_step_uses_the_new_tensor_contents(
    num_tokens: int,
    steps: list[tuple[list[int], list[int], list[int]]],
    gpu_module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replays with the same tensors but new contents: other lengths and segments, new and finished sequences."""
    if not HAS_GPU:
        run_interpreted(monkeypatch)
    reference, gpu = both_sides(gpu_module)
    pages = torch.randperm(8, dtype=torch.int32)

    def graphed(step: Step) -> Step:
        return padded(step, num_tokens, num_segments=5, num_listed=24, max_q=1 if num_tokens == 4 else 12)

    results: list[torch.Tensor] = []
    static = graphed(step_of(*steps[0], pages, reference.weights))

    def launch() -> None:
        results[:] = gpu.run(static)

    replay = launch
    if HAS_GPU:
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        replay = graph.replay
    for contexts, num_queries, slots in steps:
        step = step_of(contexts, num_queries, slots, pages, reference.weights)
        overwrite(static, graphed(step))
        replay()
        for result, expected in zip(results, reference.run(step), strict=True):
            torch.testing.assert_close(result[: sum(num_queries)].cpu(), expected, rtol=1e-4, atol=1e-4)


def test_empty_batch_writes_nothing(
    gpu_module: ModuleType, make_poisoned_pool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_GPU:
        run_interpreted(monkeypatch)
    pool = make_poisoned_pool(1, GEOMETRY, torch.float32)
    raw = pool.raw.to(DEVICE)
    pool = replace(pool, raw=raw, kv=raw.view(torch.float32), adapter=raw.view(torch.float32))
    integers = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    none = integers[:0]
    tables = AdapterTables(
        page_table=integers.view(1, 1),
        off=torch.zeros(1, 2, 4, 3, dtype=torch.int32, device=DEVICE),
        rank=torch.zeros(1, 2, 4, dtype=torch.int32, device=DEVICE),
        scale=torch.zeros(1, 2, 4, device=DEVICE),
    )
    angles = torch.zeros(0, 8, device=DEVICE)
    weights = Weights(*(torch.zeros(shape, device=DEVICE) for shape in ((64,), (64, 128), (64, 64))), angles, angles)  # type: ignore[call-arg]
    step = Step(
        hidden=torch.zeros(0, HIDDEN, device=DEVICE),
        cos=angles,
        sin=angles,
        batch=AttentionBatch(integers, none, none, none, none.long(), max_q=0),
        segments=Segments(none, integers, none),
    )
    before = raw.clone()
    assert [tuple(result.shape) for result in run(gpu_module.GpuKernels(pool), weights, tables, step)] == [
        (0, 64), (0, 32), (0, 32),
    ]  # fmt: skip
    assert torch.equal(raw, before)
