from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from loramux.admin.cli import app
from loramux.admin.server.settings import Settings
from loramux.admin.serving.serve import SETTLE_S

UNITS = sorted((Path(__file__).parents[3] / "platform" / "deploy" / "systemd").glob("*.service"))


def settings_of(unit: Path) -> dict[str, str]:
    text = unit.read_text().replace("\\\n", " ")
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_stopped_unit_has_time_to_finish_its_requests(unit: Path) -> None:
    found = settings_of(unit)
    # Otherwise, systemd also stops the child processes that running requests need.
    assert found["KillMode"] == "mixed"
    drain_s = Settings.model_fields["drain_s"].default
    assert int(found["TimeoutStopSec"]) > drain_s + SETTLE_S
    assert int(found["LimitNOFILE"]) >= Settings.model_fields["max_connections"].default + 1024


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_command_with_options_that_exist(unit: Path) -> None:
    _, command, *words = settings_of(unit)["ExecStart"].split()
    options = {name for option in typer.main.get_command(app).commands[command].params for name in option.opts}  # type: ignore[attr-defined]
    assert {word for word in words if word.startswith("--")} <= options
