from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaigns import CAMPAIGNS
from tests.docs.phrases import SUFFIXES, tracked_files
from tests.environments import ENVIRONMENTS

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
COMMANDS = {name: campaign.commands for name, campaign in CAMPAIGNS.items()}


def test_commands_leave_the_option_k_to_the_user() -> None:
    """pytest applies only the last -k, so a user's -k would silently replace the command's and run other tests."""
    recipes = [line for line in MAKEFILE.splitlines() if line.startswith("\t")]
    assert recipes
    assert [line for line in recipes if " -k " in line] == []
    assert [name for name, commands in COMMANDS.items() if any("-k" in command for command in commands)] == []


def test_every_file_that_a_target_or_campaign_names_exists() -> None:
    in_recipes = re.findall(r"\btests/[\w/.-]+", MAKEFILE)
    in_campaigns = [word for commands in COMMANDS.values() for command in commands for word in command if "/" in word]
    modules = re.findall(r"-m (tests\.[\w.]+)", MAKEFILE)
    modules += [command[0] for commands in COMMANDS.values() for command in commands if command[0] != "pytest"]
    of_environments = [file for environment in ENVIRONMENTS.values() for file in environment.requirements.values()]
    named = [*in_recipes, *in_campaigns, *of_environments]
    assert len(named) > 40
    assert len(modules) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [name for name in modules if not _is_module(name)] == []


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_every_environment_is_created_by_a_target_or_a_campaign() -> None:
    by_targets = set(re.findall(r"-m tests\.environments (\w+)", MAKEFILE))
    by_campaigns = {
        command[1] for commands in COMMANDS.values() for command in commands if command[0] == "tests.environments"
    }
    assert by_targets | by_campaigns == ENVIRONMENTS.keys()


def test_documented_campaigns_and_benchmarks_exist() -> None:
    """`make campaign NAME=fleet` runs a campaign and `make bench NAME=peers` a benchmark. None has its own target."""
    names = [name for name in tracked_files() if name.suffix in SUFFIXES]
    texts = [(ROOT / name).read_text() for name in names if (ROOT / name).is_file()]
    assert [word for text in texts for word in re.findall(r"make (?:campaign|bench)-[a-z]+", text)] == []
    named = {name for text in texts for name in re.findall(r"make campaign NAME=([a-z][\w-]*)", text)}
    assert len(named) > 15
    assert named <= CAMPAIGNS.keys()


@pytest.mark.parametrize("version", [(3, 9), (3, 10), (3, 11), (3, 13), (3, 14)])
def test_an_unsupported_python_is_refused_before_anything_is_installed(
    tmp_path: Path, version: tuple[int, int]
) -> None:
    python, environment = tmp_path / "python", tmp_path / "environment"
    code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{code}" "$2"\necho "called with $*"; exit 7\n'
    )
    python.chmod(0o755)
    command = ["make", "--directory", ROOT, "venv", f"VENV={environment}", f"PYTHON={python}"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    is_refused = "is not Python 3.11, 3.12 or 3.13: choose another" in made.stderr
    assert is_refused is not ("called with -m venv" in made.stdout), made
    assert is_refused is not ((3, 11) <= version <= (3, 13))
