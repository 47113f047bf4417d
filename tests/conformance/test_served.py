"""A server of the tests that fails to start says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conformance import served


@pytest.mark.parametrize("log_name", [None, "log"])
def test_a_failed_start_shows_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_name: str | None) -> None:
    monkeypatch.setattr(served, "LORAMUX", [sys.executable, "-c", "raise SystemExit('no such model')"])
    made = served.deployment(tmp_path / "model", tmp_path / "data", (), {})
    log_file = None if log_name is None else tmp_path / log_name
    with pytest.raises(AssertionError, match="no such model"), made.running(log_file):
        pass
