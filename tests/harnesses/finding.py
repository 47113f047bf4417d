"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    tool: str
    check: str
    found: str
    expected: str
    is_right: bool
