"""The path of the demo's base model, which tests of whole servers use."""

from __future__ import annotations

from pathlib import Path

DEMO_BASE = Path(__file__).parent.parent / "admin" / "demo" / "base"
