from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.serving.files import SMALLEST, make_base, shape_of


def test_the_shape_of_a_base_on_disk_is_read_from_its_configuration(tmp_path: Path) -> None:
    make_base(SMALLEST, 64, tmp_path / "base", torch.device("cpu"), torch.float32)
    assert shape_of(tmp_path / "base") == SMALLEST
