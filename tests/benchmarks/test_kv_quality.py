from __future__ import annotations

import json
from pathlib import Path

from benchmarks import kv_quality

DEMO = Path(__file__).parents[2] / "admin" / "demo"


def test_int8_changes_predictions_less_than_fp8(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--model", str(DEMO / "base"), "--name", "demo", "--tokens", "100", "--threads", "1"]
    assert kv_quality.main([*arguments, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["model"] == "demo"
    rows = {row["format"]: row for row in written["formats"]}
    assert list(rows) == ["int8", "fp8 with scales", "fp8", "float32"]
    assert {(row["text"], row["tokens"]) for row in rows.values()} == {("base", 100)}
    assert 0 < rows["int8"]["kl"] < rows["fp8 with scales"]["kl"] / 4
    assert rows["int8"]["same_token"] > 0.9
