from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from loramux.adapter_store.sandbox.fork_server import ForkLimits, ForkServer, ForkServerFailed, worker_environment
from tests.adapter_store.sandbox.processes import forks_of, is_running
from tests.shared_forks import SharedForkServer

PROGRAM = """
import os, sys, time
from loramux.adapter_store.sandbox import fork_server
told = []
fork_server.fork_for_each_request(idle_s={idle_s})
request = sys.stdin.read()
told.append(request)
{after}
"""

LEAVES = """
import socket
from loramux.adapter_store.sandbox import fork_server
link = socket.socket(fileno=0)
socket.recv_fds(link, fork_server._REQUEST.size, 3)
link.sendall(fork_server._REPLY.pack(0, False, 0.0))
link.recv(1)
"""
"""Answers one request and exits at the next one, like a process whose idle time ends just then."""

Open = Callable[..., ForkServer]


@pytest.fixture
def open_server() -> Iterator[Open]:
    """Open a server whose forks run the code `after`. The server exits after `idle_s` without a request."""
    opened = []

    def open_one(after: str = "print(told)", idle_s: float = 60.0) -> ForkServer:
        command = (sys.executable, "-S", "-c", PROGRAM.format(idle_s=idle_s, after=after))
        opened.append(ForkServer(command, worker_environment()))
        return opened[-1]

    yield open_one
    for server in opened:
        server.close()


def test_fork_sees_only_its_own_request(open_server: Open) -> None:
    server = open_server()
    assert server.run(b"one", ForkLimits(10)).stdout == b"['one']\n"
    pid = server.pid
    assert server.run(b"two", ForkLimits(10)).stdout == b"['two']\n"
    assert server.pid == pid, "the same process forked twice"


def test_requests_of_any_size_are_received(open_server: Open) -> None:
    assert open_server("print(len(request))").run(b"x" * 3_000_000, ForkLimits(10)).stdout == b"3000000\n"


def test_collections_in_a_fork_leave_shared_objects_alone(open_server: Open) -> None:
    ended = open_server("import gc\nprint(gc.get_freeze_count() > 1000)").run(b"", ForkLimits(10))
    assert ended.stdout == b"True\n", ended.stderr


def test_exit_status_of_a_fork_is_reported(open_server: Open) -> None:
    server = open_server("sys.exit('the reason') if request == 'fail' else os.abort()")
    failed = server.run(b"fail", ForkLimits(10))
    assert (failed.returncode, failed.took_too_long, failed.stderr) == (1, False, b"the reason\n")
    assert server.run(b"crash", ForkLimits(10)).returncode == -signal.SIGABRT


def test_a_fork_that_takes_too_long_is_killed(open_server: Open) -> None:
    server = open_server("time.sleep(60 if request == 'sleep' else 0)")
    assert server.run(b"sleep", ForkLimits(0.05)).took_too_long
    assert not server.run(b"go on", ForkLimits(30)).took_too_long


def test_a_fork_that_uses_too_much_processor_time_is_killed(open_server: Open) -> None:
    server = open_server("while time.process_time() < float(request): pass")
    killed = server.run(b"60", ForkLimits(60, cpu_s=0.05))
    assert (killed.ran_out_of_time, killed.took_too_long, killed.returncode) == (True, False, -signal.SIGPROF)
    assert killed.cpu_s >= 0.04, "the kernel's timer may be a tick early"
    ended = server.run(b"0.1", ForkLimits(60))
    assert (ended.ran_out_of_time, ended.returncode) == (False, 0)
    assert 0.1 <= ended.cpu_s < 10


def test_processor_time_of_a_fork_that_takes_too_long_is_reported(open_server: Open) -> None:
    ended = open_server("while time.process_time() < 0.01: pass\ntime.sleep(60)").run(b"", ForkLimits(0.5))
    assert ended.ran_out_of_time
    assert ended.cpu_s > 0


@pytest.mark.parametrize("way", ["without work", "killed"])
def test_exited_process_is_replaced(open_server: Open, way: str) -> None:
    server = open_server(idle_s=0.3 if way == "without work" else 60.0)
    server.run(b"one", ForkLimits(10))
    pid = server.pid
    assert pid is not None
    if way == "killed":
        os.kill(pid, signal.SIGKILL)
    while is_running(pid):
        time.sleep(0.005)
    assert server.run(b"two", ForkLimits(10)).stdout == b"['two']\n"


def test_concurrent_callers_get_their_own_answers(open_server: Open) -> None:
    server = open_server()
    requests = [str(number).encode() for number in range(20)]
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda request: server.run(request, ForkLimits(30)).stdout, requests)
    assert list(answers) == [f"['{number}']\n".encode() for number in range(20)]


def test_no_fork_outlives_its_client(open_server: Open) -> None:
    """However the client dies, the kernel closes its socket."""
    server = open_server("open('/proc/self/comm', 'w').write('hanging'); time.sleep(60)")
    pids: list[int] = []

    def vanish() -> None:
        while not (found := forks_of(server, "hanging")):
            time.sleep(0.005)
        pids.extend(found)
        assert server.pid is not None
        pids.append(server.pid)
        server.close()

    thread = threading.Thread(target=vanish)
    thread.start()
    with pytest.raises(ForkServerFailed, match="stopped"):
        server.run(b"", ForkLimits(60))
    thread.join()
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    with pytest.raises(ForkServerFailed, match="stopped"):
        server.run(b"", ForkLimits(60))


@pytest.mark.parametrize(
    ("command", "why"),
    [
        pytest.param(("/nowhere/python",), "cannot be started", id="no program"),
        pytest.param((sys.executable, "-c", "raise SystemExit('no numpy here')"), "no numpy here", id="it fails"),
        pytest.param((sys.executable, "-c", ""), "accepts no requests", id="it ends"),
    ],
)
def test_process_that_cannot_start_reports_the_reason(command: tuple[str, ...], why: str) -> None:
    server = ForkServer(command, worker_environment())
    with pytest.raises(ForkServerFailed, match=why):
        server.run(b"", ForkLimits(10))
    server.close()


def test_shared_server_needs_one_new_process_however_many_rested_ones_exit() -> None:
    command, environment = (sys.executable, "-S", "-c", LEAVES), worker_environment()
    closed = [SharedForkServer(command, environment) for _ in range(2)]
    for server in closed:
        server.run(b"", ForkLimits(10))
    for server in closed:
        server.close()
    third = SharedForkServer(command, environment)
    assert third.run(b"", ForkLimits(10)).returncode == 0
    third.close()
