from __future__ import annotations

import subprocess
import sys

MAIN = "import sys; from loramux.engine.server.worker_process import main; main(); print('torch' in sys.modules)"


def test_a_worker_whose_engine_has_ended_exits_before_it_imports_torch() -> None:
    # No process has PID 0, so this is the PID of an engine that has ended.
    arguments = (sys.executable, "-c", MAIN, "0", "meeting", "1", "0")
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
