"""Runs a tool in the environment that `make test-harnesses` made for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-harnesses"
INSIDE = Path(__file__).with_name("inside")
STAND_IN = Path(__file__).parents[1] / "strangers" / "stand_in"
TIMEOUT_S = 900


class ToolFailed(Exception):
    """A tool has failed. The message has the last line of its output."""


def run_tool(
    tool: str,
    command: list[str],
    scratch: Path,
    *,
    given: str = "",
    paths: tuple[Path, ...] = (),
    is_offline: bool = True,
) -> str:
    """Return the output of a program of a tool's environment, run in `scratch`.

    With `is_offline`, Hugging Face's libraries are told not to call the hub.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LORAMUX_", "PYTHON"))}
    environment = {
        **inherited,
        "HOME": str(scratch),
        "HF_HOME": str(scratch / "hf"),
        **({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if is_offline else {}),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    program = str(ENVIRONMENTS / tool / "bin" / command[0])
    done = subprocess.run(
        [program, *command[1:]],
        cwd=scratch, env=environment, input=given, text=True, timeout=TIMEOUT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    log = ENVIRONMENTS / f"{tool}.log"
    log.write_text(done.stdout)
    if done.returncode != 0:
        last = done.stdout.strip().rpartition("\n")[2]
        raise ToolFailed(f"exit code {done.returncode}: {last} ({log})")
    return done.stdout
