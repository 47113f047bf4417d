"""The dev container has the Python and makes the environment that the Makefile describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_dev_container_makes_the_environment_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    container: dict[str, Any] = json.loads(re.sub(r"^ *//.*$", "", text, flags=re.MULTILINE))
    python = re.search(r"^PYTHON \?=.*python(3\.\d+)", makefile, re.MULTILINE)
    assert python is not None
    assert f":{python[1]}-" in container["image"]
    maker, target = container["postCreateCommand"].split()
    assert maker == "make"
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    settings = container["customizations"]["vscode"]["settings"]
    assert settings["python.defaultInterpreterPath"] == "${containerWorkspaceFolder}/.venv/bin/python"
