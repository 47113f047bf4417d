"""The path of the demo's base model, used by tests that run a whole server."""

from __future__ import annotations

from pathlib import Path

DEMO_BASE = Path(__file__).parent.parent / "admin" / "demo" / "base"
