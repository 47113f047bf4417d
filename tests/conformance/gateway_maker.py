"""Forks gateway processes with everything already imported: `python -m tests.conformance.gateway_maker`.

Each line on standard input contains one gateway's settings as JSON. The answer is the gateway's process ID. This
process reaps its children, so that a killed gateway disappears completely. With `cluster`, it forks a whole server
whose engines run in a cluster. With `ends`, it forks one whose engine is a paced one that writes this file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import loramux.admin.server.http_servers
import loramux.admin.serving.assembly
import loramux.admin.serving.cluster
import loramux.admin.serving.gateway_assembly
import loramux.admin.serving.sharing  # noqa: F401
from loramux.admin.server.settings import Settings, load_settings
from loramux.admin.serving import gateway, serve


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        settings = json.loads(line)
        log, ends, faketime = settings.pop("log"), settings.pop("ends", None), settings.pop("faketime", None)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if faketime is not None:
                os.environ["FAKETIME"] = faketime
                # Only the gateway makes decisions that depend on the time of day.
                del os.environ["LD_PRELOAD"]
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for name in settings.keys() & {"model", "engine", "data_dir"}:
                settings[name] = Path(settings[name])
            code = 1
            try:
                if "cluster" in settings:
                    serve.run(load_settings(Settings, settings))
                elif ends is None:
                    gateway.run(load_settings(Settings, settings))
                else:
                    command = (sys.executable, "-m", "tests.conformance.paced_engine", str(settings["model"]), ends)
                    serve.run(load_settings(Settings, settings), command=command)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)


if __name__ == "__main__":
    main()
