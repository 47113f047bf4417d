"""Run a page's marked code blocks in one shell, from top to bottom.

A ```sh run``` block runs in the shell. A ```python run``` block runs in a new Python process with the shell's
environment. Other blocks are not run. Each page is one session, so later blocks see variables exported by earlier
blocks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(sh|python) run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    exit_code: int
    output: str
    errors: str


def script_of(page: Path) -> str:
    """Return the marked blocks as one shell script. Python blocks become here-documents."""
    parts = []
    for language, text in _BLOCK.findall(page.read_text()):
        parts.append(text if language == "sh" else f"python - <<'PYTHON'\n{text}PYTHON\n")
    return "\n".join(parts)


def type_page(page: Path, directory: Path, ports: Mapping[int, int], environment: Mapping[str, str]) -> Typed:
    """Run a page in `directory`, with its port numbers replaced by free ports. Stop processes left running."""
    script = script_of(page)
    for said, free in ports.items():
        script = re.sub(rf"(?<![0-9]){said}(?![0-9])", str(free), script)
    programs = directory / "bin"
    programs.mkdir(exist_ok=True)
    _program(programs / "loramux", "from loramux.admin.__main__ import main\nmain()\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}
    with (directory / "output").open("wb") as output, (directory / "errors").open("wb") as errors:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=directory,
            env={
                **inherited,
                "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "XDG_CONFIG_HOME": str(directory / "config"),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            # Start a new session, so that background processes can be stopped together.
            start_new_session=True,
        )
    try:
        exit_code = process.wait(TIMEOUT_S)
    finally:
        _end_session(process)
    return Typed(
        exit_code=exit_code,
        output=(directory / "output").read_text(),
        errors=(directory / "errors").read_text(),
    )


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        if process.poll() is None:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
        for _ in range(100):
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            subprocess.run(["sleep", "0.1"], check=True)
