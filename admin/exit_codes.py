"""How the command line ends: `docs/commands.md` explains each code."""

from __future__ import annotations

DONE, REFUSED, WRONG_CALL, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130
