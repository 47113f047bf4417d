from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from typer.testing import CliRunner, Result

from loramux.admin.cli import app
from tests.admin.admin_side import ADMIN_KEY

# Typer rebuilds the command tree for every call. Build it once per test run instead.
typer.testing._get_command = cache(typer.testing._get_command)


Run = Callable[..., Any]
"""Runs `loramux` with arguments. The result has exit_code, stdout and stderr."""


def invoke(*arguments: object, **options: Any) -> Result:
    """Run `loramux` in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def command_line(url: str, monkeypatch: pytest.MonkeyPatch, config: Path) -> Run:
    """Profiles are stored under `config`."""
    monkeypatch.setenv("LORAMUX_ADMIN_URL", url)
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    return invoke


def printed_json(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))
