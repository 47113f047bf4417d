from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.gpu.random_models import llama_config
from benchmarks.serving.files import SMALLEST, make_base, shape_of


def test_the_shape_of_a_base_on_disk_is_read_from_its_configuration(tmp_path: Path) -> None:
    make_base(SMALLEST, 64, tmp_path / "base", torch.device("cpu"), torch.float32)
    assert shape_of(tmp_path / "base") == SMALLEST


def test_heads_without_a_size_divide_the_hidden_size(tmp_path: Path) -> None:
    config = llama_config(SMALLEST, 64, torch.float32)
    del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(tmp_path) == SMALLEST
