"""A server whose engine consists of two workers: streams, killed workers, and a killed engine process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.admin.serving.test_local_engines import Server, stream
from tests.conformance.gateway_lab import children_of, is_running, until

pytestmark = pytest.mark.campaign

NUM_STREAMS = 4


@pytest.fixture(scope="module")
def server(demo_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ports = ("--port", 0, "--admin-port", 0)
    data = tmp_path_factory.mktemp("server") / "data"
    arguments = ("serve", "--model", demo_base, "--data-dir", data, *ports, "--tensor-parallel-size", 2)
    sizes = {"LORAMUX_NUM_THREADS": "2", "LORAMUX_POOL_BYTES": "64MiB", "LORAMUX_MAX_SEQUENCES": "8"}
    with Server(arguments, sizes) as server:
        yield server


@pytest.fixture(scope="module")
def key(server: Server) -> str:
    rest = f"{server.admin_url}/admin/v1"
    server.admin.post(f"{rest}/tenants", json={"slug": "acme"})
    secret: str = server.admin.post(f"{rest}/api_keys", json={"tenant": "acme"}).json()["secret"]
    return secret


def worker_pid(server: Server) -> int:
    [engine] = server.engine_pids()
    [worker] = [pid for pid in children_of(engine) if is_worker(pid)]
    return worker


def is_worker(pid: int) -> bool:
    try:
        return b"engine.server.worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_ready(server: Server) -> bool:
    return server.admin.get(f"{server.admin_url}/health/ready").status_code == 200


def is_restarted(server: Server, engine: int) -> bool:
    pids = server.engine_pids()
    return bool(pids) and engine not in pids and is_ready(server)


def num_running(server: Server) -> int:
    found: int = server.admin.get(f"{server.admin_url}/admin/v1/engine").json()["num_running"]
    return found


def is_complete(answer: httpx.Response) -> bool:
    return answer.text.rstrip().endswith("data: [DONE]") and "engine_unavailable" not in answer.text


@pytest.mark.parametrize("is_whole_engine", [False, True], ids=["worker", "engine"])
def test_streams_of_a_killed_process_end_by_an_error_and_the_engine_restarts(
    server: Server, key: str, is_whole_engine: bool
) -> None:
    until(lambda: is_ready(server))
    assert is_complete(stream(server.url, key, NUM_STREAMS))
    [engine], worker = server.engine_pids(), worker_pid(server)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        # A request that was running in two engines that died is refused, so each test has requests of its own.
        first = NUM_STREAMS * (2 + is_whole_engine)
        streams = [pool.submit(stream, server.url, key, first + number) for number in range(NUM_STREAMS)]
        until(lambda: num_running(server) == NUM_STREAMS)
        os.kill(engine if is_whole_engine else worker, signal.SIGKILL)
        answers = [one.result() for one in streams]
    assert all("engine_unavailable" in answer.text for answer in answers)
    until(lambda: not is_running(worker))
    until(lambda: is_restarted(server, engine))
    assert is_complete(stream(server.url, key, NUM_STREAMS + 1))


def test_an_idle_engine_ends_with_its_worker(server: Server, key: str) -> None:
    until(lambda: is_ready(server))
    [engine], worker = server.engine_pids(), worker_pid(server)
    os.kill(worker, signal.SIGKILL)
    until(lambda: is_restarted(server, engine))
    assert is_complete(stream(server.url, key, NUM_STREAMS + 2))


def test_a_stopped_server_leaves_no_worker(demo_base: Path, tmp_path: Path) -> None:
    ports = ("--port", 0, "--admin-port", 0)
    arguments = ("serve", "--model", demo_base, "--data-dir", tmp_path / "data", *ports, "--tensor-parallel-size", 2)
    with Server(arguments, {"LORAMUX_NUM_THREADS": "2", "LORAMUX_POOL_BYTES": "64MiB"}) as server:
        worker = worker_pid(server)
        server.process.terminate()
        server.process.wait(30)
        until(lambda: not is_running(worker))
