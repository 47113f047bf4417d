"""A long random run of a tensor-parallel engine: all workers have the same adapters in the same pages in each step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loramux.engine.adapters.adapter_load import AdapterLoad
from loramux.engine.adapters.page_copier import PageCopier
from loramux.engine.execution.direct_executor import DirectExecutor
from loramux.engine.execution.executor import Forward
from loramux.engine.parallel import workers
from loramux.engine.parallel.parallel_execution import ParallelExecutor
from loramux.engine.sequences.batch import Batch
from tests.conformance.recorded_worker import placed, stepped
from tests.conformance.test_long_life import NUM_EVENTS, Life, make_life_subject
from tests.conformance.test_tensor_parallel import END_S


def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that a recorded worker would write if it were worker 0, which is this process."""
    lines: list[str] = []
    submit, copy = ParallelExecutor.submit, PageCopier.copy

    def recorded_submit(executor: ParallelExecutor, batch: Batch) -> Forward:
        assert isinstance(executor._executor, DirectExecutor)
        lines.append(stepped(batch, executor._executor._tables))
        return submit(executor, batch)

    def recorded_copy(copier: PageCopier, load: AdapterLoad) -> None:
        lines.append(placed(load.slot, load.pages, load.digest))
        copy(copier, load)

    monkeypatch.setattr(ParallelExecutor, "submit", recorded_submit)
    monkeypatch.setattr(PageCopier, "copy", recorded_copy)
    return lines


@pytest.mark.parametrize(
    ("num_workers", "num_events"),
    [
        # With this number as the seed, all events happen early.
        pytest.param(2, 6, id="few"),
        pytest.param(2, NUM_EVENTS, id="two", marks=pytest.mark.campaign),
        pytest.param(4, NUM_EVENTS // 10, id="four", marks=pytest.mark.campaign),
    ],
)
def test_aborts_evictions_preemptions_and_reloads_reach_all_workers_alike(
    num_workers: int, num_events: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "END_S", END_S)
    path = tmp_path / "executed"
    command = (sys.executable, "-m", "tests.conformance.recorded_worker", str(path))
    monkeypatch.setattr(workers, "WORKER_COMMAND", command)
    lines = record(monkeypatch)
    life = Life(make_life_subject("llama", tmp_path), num_events, num_workers=num_workers)
    while life.events().total() < num_events or min(life.events().values()) == 0:
        life.turn()
    life.end()
    life.check()
    life.assembled.close()
    assert sum(line.startswith("adapter") for line in lines) > 3
    for number in range(1, num_workers):
        assert path.with_name(f"executed.{number}").read_text().splitlines() == lines
    print(f"{dict(life.events())} in {life.num_turns} turns, {len(lines)} messages and {len(life.asked)} requests")
