"""Starts `loramux`. Ctrl-C ends it without a traceback, even while the command line is being imported."""

from __future__ import annotations

import sys

from loramux.admin.exit_codes import INTERRUPTED


def main() -> None:
    try:
        # Imported here, because the import takes 0.3 s.
        from loramux.admin.cli import main as run

        run()
    except KeyboardInterrupt:
        print("\nloramux: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
