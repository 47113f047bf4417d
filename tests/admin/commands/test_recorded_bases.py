from __future__ import annotations

from typer.testing import CliRunner

from loramux.admin.cli import app
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
