from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loramux.engine.parallel import workers as workers_module
from loramux.engine.parallel.worker_messages import RunStep
from loramux.engine.parallel.workers import WorkerLost, Workers
from loramux.engine.sequences.batch import NO_ROWS

READ = "import sys; from multiprocessing.connection import Connection; link = Connection(int(sys.argv[1])); "
CONFIGURED = READ + "assert link.recv_bytes() == b'settings'; "
WAIT_S = 20.0


@contextmanager
def workers(program: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(workers_module, "WORKER_COMMAND", (sys.executable, "-c", program))
    found = Workers(b"settings", 2)
    try:
        yield found
    finally:
        found.close()


def test_a_worker_that_ends_while_it_loads_the_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "tensor-parallel worker 1 has ended with exit status 3"
    with workers(CONFIGURED + "sys.exit(3)", monkeypatch) as started, pytest.raises(WorkerLost, match=said):
        started.join()


def test_a_worker_that_ends_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(CONFIGURED + "link.recv_bytes()", monkeypatch) as started:
        started.check()
        started.send(RunStep.of(NO_ROWS))
        with pytest.raises(WorkerLost, match="worker 1 has ended with exit status 0"):
            started.check(WAIT_S)


def test_a_message_to_a_worker_that_has_ended_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(CONFIGURED, monkeypatch) as started:
        with pytest.raises(WorkerLost):
            started.check(WAIT_S)
        with pytest.raises(WorkerLost):
            started.send(RunStep.of(NO_ROWS))


def test_a_worker_ends_once_its_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "exec('try:\\n while True: link.recv_bytes()\\nexcept EOFError: sys.exit(0)')"
    with workers(CONFIGURED + loop, monkeypatch) as started:
        [process] = [worker.process for worker in started._workers]
        assert process.poll() is None
    assert process.returncode == 0
