from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.parts import PARTS

ROOT = Path(__file__).parents[3]
EXPECTED = Path(__file__).with_name("launches.json")

# Counts the launches of each part's cases with few layers, which takes seconds. Every part's dry run goes through the
# engine's own executor, decoder and launchers.
COUNT = """
import dataclasses
import json
import sys
from pathlib import Path

from benchmarks.gpu import dry_run, dry_trace, kernel_times, model
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cards import PLANNED
from benchmarks.gpu.table_step import META

NUM_LAYERS = 4


def few(whole):
    return dataclasses.replace(whole, num_layers=NUM_LAYERS)


model.LLAMA_8B, model.LLAMA_7B = few(model.LLAMA_8B), few(model.LLAMA_7B)
# The parts import these names.
from benchmarks.gpu import parts, s_lora

s_lora.LLAMA_7B = model.LLAMA_7B
found = {}
for card, planned in PLANNED.items():
    bench = Bench(META, False, True, False, True, False, Path(), planned=planned)
    limits = dry_run.Limits(total_s=460, warm_s=80)
    for part in dry_run.plan(bench, parts.PARTS, limits):
        assert not part.problems, (card, part.name, part.problems)
        found[f"{card} {part.name}"] = {need.case: need.num_launches for need in part.needs if need.num_launches}
    for name, traced in kernel_times.MODELS.items():
        traced = dataclasses.replace(traced, model=few(traced.model))
        needs = dry_trace.needs_of(bench, traced, kernel_times.USUAL)
        found[f"{card} trace {name}"] = {need.case: need.num_launches for need in needs}
json.dump(found, sys.stdout)
"""


def counted() -> dict[str, dict[str, int]]:
    """The launches of each case. In a process of its own, because the interpreter has no programs to inspect."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_dry_runs_launch_what_was_committed() -> None:
    """Update `launches.json` with `python -m tests.benchmarks.gpu.test_launches` if a change of launches is meant."""
    found, expected = counted(), json.loads(EXPECTED.read_text())
    assert found == expected
    for part in PARTS:
        assert any(name.endswith(f" {part.name}") for name in expected), part.name


if __name__ == "__main__":
    EXPECTED.write_text(json.dumps(counted(), indent=1) + "\n")
