from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest

from loramux.admin.server.connection_limits import MAX_ADMIN_CONNECTIONS, PEER_DESCRIPTORS, RESERVED_DESCRIPTORS
from loramux.platform.replicas.peer_listener import MAX_CONNECTIONS


def test_a_thousand_idle_sockets_leave_the_database_its_descriptors() -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-m", "tests.admin.server.limited_server", str(RESERVED_DESCRIPTORS + 200)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        ) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            for _ in range(20):
                answered = http.get("/", headers={"connection": "close"})
                assert (answered.status_code, answered.text) == (200, "rows: 1")


@pytest.mark.parametrize(
    ("soft", "hard", "has_peers", "said"),
    [
        pytest.param(256, None, False, f"{RESERVED_DESCRIPTORS + 1000 + MAX_ADMIN_CONNECTIONS} 1000 512", id="raised"),
        pytest.param(256, 1024, False, "1024 384 128", id="up to the hard limit"),
        pytest.param(256, 1024 + PEER_DESCRIPTORS, True, f"{1024 + PEER_DESCRIPTORS} 384 128", id="with peers"),
        pytest.param(256, 512, False, "leaves no room for connections: raise the hard limit", id="refused"),
    ],
)
def test_the_limit_on_open_files_is_raised_at_start(soft: int, hard: int | None, has_peers: bool, said: str) -> None:
    program = f"""
import resource
from loramux.admin.server.connection_limits import make_room
from loramux.admin.errors import StartRefused
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard} or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    limits = make_room(1000, 100, {has_peers})
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], limits.openai.max_connections, limits.admin.max_connections)
except StartRefused as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout
    assert ("fewer connections than max_connections" in done.stdout) == (said.endswith("384 128"))


def test_peers_reserve_six_descriptors_per_connection() -> None:
    assert PEER_DESCRIPTORS == 6 * MAX_CONNECTIONS
