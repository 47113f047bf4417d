from __future__ import annotations

import json
from pathlib import Path

from benchmarks import adapter_quality

DEMO = Path(__file__).parents[2] / "admin" / "demo"


def test_an_adapter_in_fp8_predicts_almost_what_it_predicts_in_bfloat16(tmp_path: Path) -> None:
    """The divergence of the base shows that the adapter was applied at all."""
    out = tmp_path / "figures.json"
    arguments = ["--model", str(DEMO / "base"), "--name", "demo", "--adapter", str(DEMO / "adapters" / "formal")]
    assert adapter_quality.main([*arguments, "--prompts", "1", "--threads", "1", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    (row,) = written["adapters"]
    assert (written["model"], row["adapter"]) == ("demo", "formal")
    assert row["tokens"] > 10
    assert row["same_token"] > 0.9
    assert 0 < row["kl_bfloat16"] < row["kl_fp8"] < row["kl_base"] / 100
