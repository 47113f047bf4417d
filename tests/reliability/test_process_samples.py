from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import count

import pytest

from tests.reliability.process_samples import Sampler, process_usage, processes_of


def test_processes_are_named_after_their_modules_and_measured() -> None:
    with subprocess.Popen([sys.executable, "-m", "code"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        # The interpreter's greeting: it has started.
        child.stderr.readline()
        roles = processes_of(os.getpid())
        assert (roles[os.getpid()], roles[child.pid]) == ("server", "code")
        usage = process_usage(os.getpid())
        child.communicate()
    assert usage["code: threads"] == 1
    assert usage["code: descriptors"] >= 3
    assert 1 < usage["code: memory, MB"] < 500
    assert usage["server: threads"] >= 1


def test_sampler_fills_up_what_a_sample_lacks() -> None:
    numbers, has_three = count(), threading.Event()

    def read() -> dict[str, float]:
        number = next(numbers)
        if number == 3:
            has_three.set()
        return {"a": float(number)} if number % 2 else {"b": 1.0}

    with Sampler(read, 0.001) as sampler:
        assert has_three.wait(10)
    assert sampler.series["a"][:3] == [0, 1, 0]
    assert sampler.series["b"][:3] == [1, 0, 1]
    assert len(sampler.series["a"]) == len(sampler.series["b"])


def test_block_raises_what_the_samples_raise() -> None:
    has_failed = threading.Event()

    def read() -> dict[str, float]:
        has_failed.set()
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), Sampler(read, 0.001):
        assert has_failed.wait(10)
