from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.answers import CheckError
from benchmarks.kv_attention import SHAPES, Decode, main
from loramux.kernels.cpu.instructions.threads import set_num_threads


def test_both_formats_are_checked_and_timed(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--shape", "SmolLM2-135M", "--context", "20", "--rows", "2", "--rounds", "1"]
    before = torch.get_num_threads()
    assert main([*arguments, "--out", str(out)]) == 0
    set_num_threads(before)
    [case] = json.loads(out.read_text())["cases"]
    assert (case["rows"], case["context"]) == (2, 20)
    assert case["ratio"] > 0


def test_a_wrong_result_stops_the_benchmark() -> None:
    decode = Decode(SHAPES["SmolLM2-135M"], 1, 20)
    scales = decode.pools["int8"].kv_scales
    assert scales is not None
    # The reference reads the same pages, so only the kernels' own view of the scales is changed.
    decode.kernels["int8"]._scales[3, 64] = scales.clone().mul_(2).view(torch.uint16).numpy()
    with pytest.raises(CheckError, match="int8 is wrong"):
        decode.check()
