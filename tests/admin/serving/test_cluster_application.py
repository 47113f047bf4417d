"""Settings of engines that run on other machines. tests/cluster builds such engines with Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.admin.errors import StartRefused
from loramux.admin.server.settings import Settings
from loramux.admin.serving.serve import read_model


def test_a_machine_need_not_have_the_device_of_other_machines(demo_base: Path, tmp_path: Path) -> None:
    settings = Settings(model=demo_base, data_dir=tmp_path, device="cuda")
    assert read_model(settings, runs_here=False)[1].device == "cuda"
    with pytest.raises(StartRefused, match="set device to cpu or cuda"):
        read_model(Settings(model=demo_base, data_dir=tmp_path), runs_here=False)
