"""The memory of a server includes the processes that it started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.memory import descendants, pool_bytes, proportional_set_size
from benchmarks.peers.model_files import ModelFiles
from benchmarks.random_model import SHAPES

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "held = bytearray(64 << 20); print('held', flush=True); input()"])
child.wait()
"""


def test_memory_of_a_child_is_found() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"held\n"
        parent, child = descendants(process.pid)
        assert parent == process.pid
        assert child not in (os.getpid(), parent)
        assert proportional_set_size(child) > 64 << 20 > proportional_set_size(parent)
        process.stdin.write(b"\n")


def test_pool_holds_all_requests(tmp_path: Path) -> None:
    # A token's K and V take 32 KiB in the 1B model.
    assert pool_bytes(ModelFiles(tmp_path, SHAPES["1b"], 0, 1)) == 4 * 496 * 32 << 10
