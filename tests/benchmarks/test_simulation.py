from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import simulation
from tests.engine.simulated_device import SimulatedExecutor

SMALL = ("--running", "4", "--steps", "200", "--allow-busy")


@pytest.mark.campaign
def test_run_writes_figures_with_and_without_stepping_ahead(tmp_path: Path) -> None:
    out = tmp_path / "simulation.json"
    simulation.main([*SMALL, "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    assert set(results) == {"at once", "one step ahead"}
    for result in results.values():
        assert 3 < result["running_on_average"] <= 4
        assert result["answers_checked"] > 2
        assert 0 < result["steps_per_s_median"] <= result["steps_per_s_best"]


def test_wrong_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(SimulatedExecutor, "generate", lambda *_arguments: [])
    assert simulation.main(SMALL) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "nothing was measured: " in said
    assert "did not generate" in said
