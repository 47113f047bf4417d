from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loramux.admin.cli import app
from loramux.admin.client.recorded_base import with_recorded_base
from tests.admin.command_line import Run
from tests.admin.peft_directory import MakeAdapter
from tests.demo_base import DEMO_BASE

RECORDED = "adapter_config.json says that the adapter was trained on"


def test_push_and_check_name_the_base_of_an_adapter_that_does_not_fit(loramux: Run, make_adapter: MakeAdapter) -> None:
    loramux("tenants", "create", "acme")
    pirate = DEMO_BASE.parent / "adapters" / "pirate"
    pushed = loramux("adapters", "push", pirate, "--tenant", "acme", "--name", "pirate")
    assert (pushed.exit_code, f"; {RECORDED} loramux-demo" in pushed.stderr) == (1, True), pushed.output
    small = make_adapter(config={"base_model_name_or_path": "small\n[red]base"})
    checked = CliRunner().invoke(app, ["check", str(small), "--model", str(DEMO_BASE)])
    said = " ".join(checked.output.split())
    assert (checked.exit_code, f"; {RECORDED} small?[red]base" in said) == (1, True), checked.output


@pytest.mark.parametrize("config", [None, "{", "[]", "{}", '{"base_model_name_or_path": null}'])
def test_a_configuration_without_a_base_adds_nothing(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    assert with_recorded_base("base_mismatch", "it differs", tmp_path) == "it differs"


def test_another_rejection_does_not_name_the_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    assert with_recorded_base("zero_effect", "no effect", tmp_path) == "no effect"
