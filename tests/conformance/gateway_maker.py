"""Forks gateway processes with everything already imported: `python -m tests.conformance.gateway_maker`.

Each line on standard input contains one gateway's settings as JSON. The answer is the gateway's process ID. This
process reaps its children, so that a killed gateway disappears completely.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import loramux.admin.gateway_assembly
import loramux.admin.server.http_servers  # noqa: F401
from loramux.admin.gateway import run
from loramux.admin.server.settings import Settings, load_settings


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        settings = json.loads(line)
        log = settings.pop("log")
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for name in ("model", "engine", "data_dir"):
                settings[name] = Path(settings[name])
            code = 1
            try:
                run(load_settings(Settings, settings))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)


if __name__ == "__main__":
    main()
