"""Runs `loramux` with this process's arguments until the demo ends, which closes standard input."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _stop_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        # No input is expected. Only the end of input matters.
        continue
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    runpy.run_module("loramux.admin.cli", run_name="__main__", alter_sys=True)
