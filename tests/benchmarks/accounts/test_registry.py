from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.accounts import registry
from benchmarks.accounts.registry_world import World

SMALL = ("--tenants", "3", "--adapters-each", "4", "--versions-each", "3", "--calls", "20", "--allow-busy")


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:XDG_RUNTIME_DIR")
def test_run_writes_figures_for_both_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "registry.json"
    monkeypatch.setattr(sys, "argv", ["registry", *SMALL, "--out", str(out)])
    monkeypatch.setattr(registry, "TARGET_MS", 1e6)
    registry.main()
    document = json.loads(out.read_text())
    assert document["world"] == {"tenants": 3, "adapters": 12, "versions": 36}
    assert set(document["results"]) == {"sqlite", "postgresql"}
    for result in document["results"].values():
        assert set(result["resolve"]) == set(registry.KINDS)
        assert all(0 < figures["p50_ms"] <= figures["p99_ms"] for figures in result["resolve"].values())


@pytest.mark.campaign
def test_wrong_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["registry", *SMALL])
    monkeypatch.setattr(World, "default", lambda _self, _tenant, _adapter: 3)
    monkeypatch.setattr(registry, "digest_of", lambda _tenant, _adapter, _number: "0" * 64)
    assert registry.main() == 1
    assert "digest" in capsys.readouterr().out
