"""The engine of an `LLM`: what happens to it in forks, with many files, after failures and after its end."""

from __future__ import annotations

import gc
import os
import resource
import signal
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from loramux.engine.llm import LLM, EngineClosed, SamplingParams
from loramux.engine.loop.engine import Engine
from loramux.engine.sequences.timers import Timers
from tests.demo_base import DEMO_BASE

PROMPT = "What is the capital of France?"
POOL_BYTES = 16 << 20
TIMEOUT_S = 60
FIRST_UNSELECTABLE = 1024
"""`select` can watch only descriptors below this one."""


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """All later descriptors are too large for `select`."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(before[1], 4096)), before[1]))
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] < FIRST_UNSELECTABLE:
            held.append(os.dup(held[0]))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_program_with_many_files_has_an_engine(many_descriptors: None) -> None:
    with LLM(DEMO_BASE, device="cpu", pool_bytes=POOL_BYTES) as llm:
        assert llm.generate(PROMPT, regex="[ab]{3}", sampling=SamplingParams(seed=1))[0].finish_reason == "stop"


def test_a_fork_is_told_that_it_has_no_engine() -> None:
    with LLM(DEMO_BASE, device="cpu", pool_bytes=POOL_BYTES) as llm:
        with warnings.catch_warnings():
            # Since Python 3.12, a fork warns if there are threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            signal.alarm(TIMEOUT_S)
            with suppress(BaseException):
                try:
                    llm.generate([[5]], max_tokens=1)
                except EngineClosed as closed:
                    llm.close()
                    os._exit(0 if f"belongs to the process {os.getppid()}" in str(closed) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(llm.generate([[5]], max_tokens=1)[0].token_ids) <= 1


def test_a_failure_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = []

    def fail(engine: Engine) -> bool:
        engines.append(weakref.ref(engine))
        raise OSError("the memory is on fire")

    monkeypatch.setattr(Engine, "step", fail)
    llm = LLM(DEMO_BASE, device="cpu", pool_bytes=POOL_BYTES)
    with pytest.raises(EngineClosed, match="the memory is on fire") as raised:
        llm.generate(PROMPT)
    assert "in fail" in raised.value.__notes__[0]
    llm.close()
    gc.collect()
    assert engines[0]() is None
    with pytest.raises(EngineClosed, match="the memory is on fire"):
        llm.generate(PROMPT)


def test_an_unlimited_wait_takes_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    added = []
    monkeypatch.setattr(Timers, "after", lambda *arguments: added.append(arguments))
    with LLM(DEMO_BASE, device="cpu", pool_bytes=POOL_BYTES) as llm:
        llm.generate([[5]] * 2, max_tokens=1)
    assert added == []
