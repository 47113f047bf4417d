"""Calls of a client that fail a few times, as during a restart of the server."""

from __future__ import annotations

from typing import Any

import pytest


def fail_first(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str, *errors: Exception, where: str = ""
) -> None:
    """Let the first calls of a method raise these errors, and repeat reads at once. `where` is a part of the path that
    the calls must have.
    """
    monkeypatch.setattr("loramux.admin.client.retries.PAUSE_S", 0.0)
    call, left = getattr(kind, name), list(errors)

    def fail_or_call(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if left and where in path:
            raise left.pop(0)
        return call(self, path, *arguments, **options)

    monkeypatch.setattr(kind, name, fail_or_call)
