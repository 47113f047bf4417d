from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from loramux.engine.parallel import process_groups
from loramux.engine.parallel import workers as workers_module
from loramux.engine.parallel.worker_messages import RunStep
from loramux.engine.parallel.workers import WorkerLost, Workers
from loramux.engine.sequences.batch import NO_ROWS

READ = "import sys; from multiprocessing.connection import Connection; link = Connection(int(sys.argv[1])); "
CONFIGURED = READ + "assert link.recv_bytes() == b'settings'; "
SIGNALLED = CONFIGURED + "link.send_bytes(b''); link.send_bytes(b'base'); "
LOADED = SIGNALLED + "assert link.recv_bytes() == b'join'; "
UNTIL_CLOSED = "exec('try:\\n while True: link.recv_bytes()\\nexcept EOFError: sys.exit(0)')"
WAIT_S = 120.0


@contextmanager
def workers(program: str, monkeypatch: pytest.MonkeyPatch, size: int = 2, end_s: float = WAIT_S) -> Iterator[Workers]:
    monkeypatch.setattr(workers_module, "WORKER_COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(workers_module, "END_S", end_s)
    found = Workers(b"settings", size, "cpu")
    try:
        yield found
    finally:
        found.close()


def test_a_worker_that_ends_while_it_loads_the_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "tensor-parallel worker 1 has ended with exit status 3"
    with workers(CONFIGURED + "sys.exit(3)", monkeypatch) as started, pytest.raises(WorkerLost, match=said):
        started.join("base")


def test_a_worker_that_refuses_its_share_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "^tensor-parallel worker 1 did not start: the pool is too small$"
    program = CONFIGURED + "link.send_bytes(b'the pool is too small'); " + UNTIL_CLOSED
    with workers(program, monkeypatch) as started, pytest.raises(WorkerLost, match=said):
        started.join("base")


def test_a_worker_that_read_other_files_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "^tensor-parallel worker 1 read other files than worker 0: the files in the model directory changed while"
    with workers(SIGNALLED + UNTIL_CLOSED, monkeypatch) as started, pytest.raises(WorkerLost, match=said):
        started.join("another base")


def test_a_worker_that_does_not_join_the_others_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "JOIN_TIMEOUT", timedelta(seconds=0.2))
    said = "^the tensor-parallel workers cannot connect: "
    with workers(LOADED + UNTIL_CLOSED, monkeypatch) as started, pytest.raises(WorkerLost, match=said):
        started.join("base")


def test_any_failure_to_connect_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no more files")

    with workers(LOADED + UNTIL_CLOSED, monkeypatch) as started:
        monkeypatch.setattr(started.group, "join", fail)
        with pytest.raises(WorkerLost, match=r"^the tensor-parallel workers cannot connect: .*no more files"):
            started.join("base")


def test_a_worker_that_ends_while_the_others_join_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    with workers(LOADED + UNTIL_CLOSED, monkeypatch) as started:
        [process] = [worker.process for worker in started._workers]

        def kill_and_wait() -> None:
            process.kill()
            assert is_over.wait(WAIT_S)

        monkeypatch.setattr(started.group, "join", kill_and_wait)
        with pytest.raises(
            WorkerLost, match=f"^tensor-parallel worker 1 has ended with exit status -{signal.SIGKILL}$"
        ):
            started.join("base")
        is_over.set()


def test_a_failed_start_leaves_no_process_and_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = workers_module._start, []

    def start_one(meeting: Path, number: int) -> workers_module._Worker:
        if number == 2:
            raise OSError("no more processes")
        started.append((meeting, start(meeting, number)))
        return started[-1][1]

    monkeypatch.setattr(workers_module, "_start", start_one)
    with pytest.raises(OSError, match="no more processes"), workers(CONFIGURED + UNTIL_CLOSED, monkeypatch, size=3):
        pass
    [(meeting, worker)] = started
    assert worker.process.returncode == 0
    assert worker.connection.closed
    assert not meeting.parent.exists()


def test_a_worker_that_ends_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(CONFIGURED + "link.recv_bytes()", monkeypatch) as started:
        started.check()
        started.send(RunStep.of(NO_ROWS))
        with pytest.raises(WorkerLost, match="worker 1 has ended with exit status 0"):
            started.check(WAIT_S)


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        ("os.kill(os.getpid(), 9)", 1, f"tensor-parallel worker 1 has ended with exit status -{signal.SIGKILL}\n"),
        ("sys.exit(0)", 1, "tensor-parallel worker 1 has ended with exit status 0\n"),
        ("sys.exit('no memory')", 1, "no memory\n"),
        ("print('the GPU failed', file=sys.stderr); sys.exit(4)", 4, "the GPU failed\n"),
    ],
    ids=["killed", "without a reason", "with a reason", "with a reason and a status"],
)
def test_a_process_that_cannot_be_told_exits_soon_after_a_worker(
    ends: str, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    statuses: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(workers_module, "EXIT_AFTER_WORKER_S", 0.0)
    monkeypatch.setattr(workers_module.os, "_exit", statuses.put)  # type: ignore[attr-defined]
    with workers(LOADED + f"link.send_bytes(b''); link.recv_bytes(); import os; {ends}", monkeypatch) as started:
        monkeypatch.setattr(started.group, "reports_ends", False)
        monkeypatch.setattr(started.group, "join", lambda: None)
        started.join("base")
        started.await_ready()
        started.send(RunStep.of(NO_ROWS))
        assert statuses.get(timeout=WAIT_S) == status
    assert capfd.readouterr().err == said


def test_a_worker_whose_end_was_noticed_already_is_followed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    statuses: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(workers_module, "EXIT_AFTER_WORKER_S", 0.0)
    monkeypatch.setattr(workers_module.os, "_exit", statuses.put)  # type: ignore[attr-defined]
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "follow-workers":
            [worker] = started._workers
            worker.process.kill()
            worker.process.wait()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    with workers(LOADED + UNTIL_CLOSED, monkeypatch) as started:
        monkeypatch.setattr(started.group, "reports_ends", False)
        monkeypatch.setattr(started.group, "join", lambda: None)
        started.join("base")
        assert statuses.get(timeout=WAIT_S) == 1


def test_a_process_that_closes_its_workers_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module.os, "_exit", lambda status: pytest.fail("this process would exit"))  # type: ignore[attr-defined]
    with workers(LOADED + "link.send_bytes(b''); " + UNTIL_CLOSED, monkeypatch) as started:
        monkeypatch.setattr(started.group, "reports_ends", False)
        monkeypatch.setattr(started.group, "join", lambda: None)
        started.join("base")
    [follower] = [thread for thread in threading.enumerate() if thread.name == "follow-workers"] or [None]
    if follower is not None:
        follower.join(WAIT_S)
        assert not follower.is_alive()


def test_a_worker_that_has_no_room_for_its_pool_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "^tensor-parallel worker 1 did not start: the pool is too large$"
    program = LOADED + "link.send_bytes(b'the pool is too large'); " + UNTIL_CLOSED
    with workers(program, monkeypatch) as started:
        monkeypatch.setattr(started.group, "join", lambda: None)
        started.join("base")
        with pytest.raises(WorkerLost, match=said):
            started.await_ready()


def test_a_message_to_a_worker_that_has_ended_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(CONFIGURED, monkeypatch) as started:
        with pytest.raises(WorkerLost):
            started.check(WAIT_S)
        with pytest.raises(WorkerLost):
            started.send(RunStep.of(NO_ROWS))


def test_workers_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = CONFIGURED + "link.send_bytes(b''); import signal; signal.pause()"
    with workers(stuck, monkeypatch, size=3, end_s=0.1) as started:
        processes = [worker.process for worker in started._workers]
        for worker in started._workers:
            worker.await_signal()
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_a_worker_ends_once_its_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(CONFIGURED + UNTIL_CLOSED, monkeypatch) as started:
        [process] = [worker.process for worker in started._workers]
        assert process.poll() is None
    assert process.returncode == 0
