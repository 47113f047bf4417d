"""Where the base model of the demo lies, on which whole servers are tested."""

from __future__ import annotations

from pathlib import Path

DEMO_BASE = Path(__file__).parent.parent / "admin" / "demo" / "base"
