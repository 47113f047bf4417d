from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import PARTS

ROOT = Path(__file__).parents[3]
EXPECTED = Path(__file__).with_name("launches.json")

# Counts the launches of each part's first case with few layers. Every part's dry run goes through the engine's own
# executor, decoder and launchers. H100 and H200 differ only in memory, so an H200 counts what depends on it.
COUNT = """
import dataclasses
import gc
import json
import sys
from pathlib import Path

gc.disable()

from benchmarks.gpu import attention, codes, cold, lora, model, s_lora, step
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cards import PLANNED
from benchmarks.gpu.table_step import META


def few(whole, num_layers=2):
    return dataclasses.replace(whole, num_layers=num_layers)


model.LLAMA_8B, s_lora.LLAMA_7B = few(model.LLAMA_8B), few(model.LLAMA_7B)
# These modules import the models by name.
from benchmarks.gpu import dry_run, dry_trace, kernel_times, parts

# Collections after a part look only at what the parts made, not at the imported modules.
gc.freeze()
gc.enable()

for part in (attention, codes, lora, step):
    part.cases = lambda bench, cases=part.cases: cases(bench)[:1]
code_cases = codes.cases
# The codes are drawn on the host, which is slow. Fewer inputs need the same number of launches.
codes.cases = lambda bench: [
    dataclasses.replace(case, rows=case.rows[-1:], in_features=1024) for case in code_cases(bench)
]
s_lora.steps_to_warm = lambda workload, name, steps=s_lora.steps_to_warm: steps(workload, name)[:1]
cold.cold_of = lambda bench, whole=cold.cold_of: dataclasses.replace(whole(bench), ranks=(16,))
contexts = kernel_times.Contexts(
    (((kernel_times.StepCase(8, 1024), (0, 8)),),), (kernel_times.PrefillCase(1, 2048),)
)
limits = dry_run.Limits(total_s=460, warm_s=80)
names = {
    "h100": ([part.name for part in parts.PARTS], ["qwen3.5-9b"]),
    "h200": (["s_lora"], ["qwen3-30b-a3b"]),
}
if "quick" in sys.argv:
    names = {"h100": (["lora", "step"], [])}
found = {}
for card, (wanted, models) in names.items():
    bench = Bench(META, False, True, False, True, False, Path(), planned=PLANNED[card])
    for part in dry_run.plan(bench, [part for part in parts.PARTS if part.name in wanted], limits):
        assert not part.problems, (card, part.name, part.problems)
        found[f"{card} {part.name}"] = {need.case: need.num_launches for need in part.needs if need.num_launches}
    for name in models:
        traced = kernel_times.MODELS[name]
        # One of a hybrid decoder's four layers has attention.
        num_layers = 2 if traced.model.hybrid is None else 4
        needs = dry_trace.needs_of(bench, dataclasses.replace(traced, model=few(traced.model, num_layers)), contexts)
        found[f"{card} trace {name}"] = {need.case: need.num_launches for need in needs}
json.dump(found, sys.stdout)
"""


def counted(*arguments: str) -> dict[str, dict[str, int]]:
    """The launches of each case. In a process of its own, because the interpreter has no programs to inspect."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNT, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_dry_runs_of_steps_and_adapters_launch_what_was_committed() -> None:
    found, expected = counted("quick"), json.loads(EXPECTED.read_text())
    assert found == {name: expected[name] for name in ("h100 lora", "h100 step")}


@pytest.mark.campaign
def test_dry_runs_launch_what_was_committed() -> None:
    """Update `launches.json` with `python -m tests.benchmarks.gpu.test_launches` if a change of launches is meant."""
    found, expected = counted(), json.loads(EXPECTED.read_text())
    assert found == expected
    for part in PARTS:
        assert any(name.endswith(f" {part.name}") for name in expected), part.name


if __name__ == "__main__":
    EXPECTED.write_text(json.dumps(counted(), indent=1) + "\n")
