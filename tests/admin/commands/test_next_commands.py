from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loramux.admin.serving.serve import next_commands


def test_commands_that_a_new_server_prints_work_as_written(
    loramux: Callable[..., Any], make_adapter: Callable[..., Path]
) -> None:
    lines = next_commands("http://127.0.0.1:8001", "sk-lmx-shown-once").splitlines()
    typed = [shlex.split(line) for line in lines if line.startswith("  ")]
    assert typed[0] == ["export", "LORAMUX_ADMIN_URL=http://127.0.0.1:8001", "LORAMUX_ADMIN_KEY=sk-lmx-shown-once"]
    directory = make_adapter()
    for program, *arguments in typed[1:]:
        assert program == "loramux"
        result = loramux(*(str(directory) if word == "PEFT_DIRECTORY" else word for word in arguments))
        assert result.exit_code == 0, result.output
    assert "acme/my-adapter version 1 is ready" in result.stdout
    assert len(typed) == 4
