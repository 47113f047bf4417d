"""The command line's exit codes, explained in `docs/commands.md`."""

from __future__ import annotations

DONE, REFUSED, WRONG_CALL, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130
