"""The workflows of GitHub Actions agree with the Makefile and with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job.get("steps", ())


def test_ci_runs_with_every_supported_python() -> None:
    supported = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    job = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["check-and-test"]
    minors = [f"3.{minor}" for minor in range(30)]
    assert job["strategy"]["matrix"]["python"] == [minor for minor in minors if f"{minor}.1" in supported]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_may_only_read_unless_a_job_says_otherwise(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    writing = {name for name, job in workflow["jobs"].items() if "write" in job.get("permissions", {}).values()}
    assert writing == ({"image", "release"} if path.name == "release.yml" else set())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_has_a_time_limit(path: Path) -> None:
    jobs = read(path)["jobs"].items()
    assert [name for name, job in jobs if "uses" not in job and "timeout-minutes" not in job] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_checkout_keeps_no_credentials(path: Path) -> None:
    for step in steps(read(path)):
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_scripts_get_the_events_data_only_through_variables(path: Path) -> None:
    """An expression inside a script would let the name of a branch or tag run commands."""
    assert [step["run"] for step in steps(read(path)) if "${{" in step.get("run", "")] == []


def test_workflows_run_existing_targets() -> None:
    targets = set(re.findall(r"(?m)^([a-z0-9-]+):", (ROOT / "Makefile").read_text()))
    scripts = [step["run"] for path in WORKFLOWS for step in steps(read(path)) if "run" in step]
    used = {target for script in scripts for target in re.findall(r"\bmake ([a-z-]+)", script)}
    assert {"venv", "campaign"} <= used
    assert used <= targets
