"""Fixtures of the tests of clusters."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign's own variables are not settings of a server, which refuses unknown ones."""
    for name in [name for name in os.environ if name.startswith("LORAMUX_")]:
        monkeypatch.delenv(name)
