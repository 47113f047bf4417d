"""`loramux serve` as its own process: it starts, serves, drains, and refuses to start with a sentence."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ADMIN_KEY = "a-key-of-more-than-thirty-two-characters"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")} | {
    "PYTHONPATH": ".src"
}


def serve(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "loramux.admin.cli", "serve", *(str(argument) for argument in arguments)],
        env={**ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Server:
    """A running server, found by what it announces."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip())
            if len(self.lines) >= 3:
                break
        else:
            raise AssertionError(process.stderr.read() if process.stderr else "")
        self.url = self.lines[1].split()[-1].removesuffix("/v1")
        self.admin_url = self.lines[2].split()[-1]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float, str]:
        """Signal it; the exit code, the seconds it took and its standard error."""
        started = time.monotonic()
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=40)
        return self.process.returncode, time.monotonic() - started, errors


Start = Callable[..., Server]


@pytest.fixture
def start(demo_base: Path, tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def begin(*arguments: object, **variables: str) -> Server:
        ports = ("--port", 0, "--admin-port", 0)
        processes.append(
            serve("--model", demo_base, "--data-dir", tmp_path / "data", *ports, *arguments, **variables)
        )
        return Server(processes[-1])

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_request_is_served_and_a_signal_drains_it(start: Start) -> None:
    server = start(LORAMUX_ADMIN_KEY=ADMIN_KEY)
    assert server.lines[0].startswith("loramux serves base (cpu, ")
    operator = {"authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(trust_env=False, timeout=30) as http:
        assert http.get(f"{server.url}/health/ready").status_code == 200
        http.post(f"{server.admin_url}/admin/v1/tenants", json={"slug": "acme"}, headers=operator)
        key = http.post(f"{server.admin_url}/admin/v1/api_keys", json={"tenant": "acme"}, headers=operator).json()
        caller = {"authorization": f"Bearer {key['secret']}"}
        long = {"model": "base", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"{server.url}/v1/completions", json=long, headers=caller) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            ending: list[Any] = []
            stopping = threading.Thread(target=lambda: ending.append(server.end(signal.SIGINT)))
            stopping.start()
            assert list(lines)[-2:] == ["data: [DONE]", ""]
    stopping.join()
    code, _, errors = ending[0]
    assert code == 0, errors
    assert "Traceback" not in errors


def test_a_second_signal_hurries(start: Start) -> None:
    server = start(LORAMUX_ADMIN_KEY=ADMIN_KEY)
    operator = {"authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(trust_env=False, timeout=30) as http:
        http.post(f"{server.admin_url}/admin/v1/tenants", json={"slug": "acme"}, headers=operator)
        key = http.post(f"{server.admin_url}/admin/v1/api_keys", json={"tenant": "acme"}, headers=operator).json()
        caller = {"authorization": f"Bearer {key['secret']}"}
        # Long enough that only a hurried end can be quick.
        endless = {"model": "base", "prompt": ["Hi"] * 64, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"{server.url}/v1/completions", json=endless, headers=caller) as response:
            next(response.iter_lines())
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            code, seconds, errors = server.end()
    assert code == 0, errors
    assert seconds < 6


def test_the_first_start_shows_an_administrators_key_once(start: Start) -> None:
    first = start()
    shown = first.process.stdout.readline().split()  # type: ignore[union-attr]
    assert shown[:2] == ["admin", "key"]
    with httpx.Client(trust_env=False) as http:
        headers = {"authorization": f"Bearer {shown[2]}"}
        assert http.get(f"{first.admin_url}/admin/v1/tenants", headers=headers).status_code == 200
        assert first.end()[0] == 0
        second = start()
        assert http.get(f"{second.admin_url}/admin/v1/tenants", headers=headers).status_code == 200
    second.process.send_signal(signal.SIGTERM)
    output, _ = second.process.communicate(timeout=30)
    assert "sk-lmx-" not in output


def refusal(*arguments: object, **variables: str) -> str:
    process = serve(*arguments, **variables)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert output == ""
    assert "Traceback" not in errors
    return errors


def test_a_port_in_use_is_refused(demo_base: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        errors = refusal("--model", demo_base, "--data-dir", tmp_path / "data", "--port", 0, "--admin-port", port)
    assert errors == (
        f"loramux: cannot listen on 127.0.0.1 port {port}: address already in use; choose another with --admin-port\n"
    )
    assert not (tmp_path / "data").exists()


def test_a_data_directory_serves_one_server(start: Start, demo_base: Path, tmp_path: Path) -> None:
    start()
    errors = refusal("--model", demo_base, "--data-dir", tmp_path / "data", "--port", 0, "--admin-port", 0)
    assert "another loramux uses the data directory" in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("--model", "/nowhere"), "there is no directory /nowhere", id="no model"),
        pytest.param(("--model", "MODEL", "--dtype", "int3"), "int3", id="dtype"),
        pytest.param(("--model", "MODEL", "--host", "no-such-host.invalid"), "no-such-host.invalid", id="host"),
        pytest.param(("--model", "MODEL", "--database-url", "mysql://h/x"), "use SQLite or PostgreSQL", id="database"),
        pytest.param(
            ("--model", "MODEL", "--database-url", "postgresql://127.0.0.1:9/x?connect_timeout=2"),
            "cannot be used",
            id="database down",
        ),
        pytest.param(("--model", "MODEL", "--blob-url", "file:///proc/nowhere"), "/proc/nowhere", id="blobs"),
        pytest.param(("--model", "MODEL", "--data-dir", "/proc/nowhere"), "data directory /proc/nowhere", id="data"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(
    demo_base: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    given = [str(demo_base) if argument == "MODEL" else argument for argument in arguments]
    if "--data-dir" not in given:
        given += ["--data-dir", str(tmp_path / "data")]
    assert said in refusal(*given, "--port", 0, "--admin-port", 0)


def test_a_model_without_weights_is_refused(demo_base: Path, tmp_path: Path) -> None:
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (hollow / name).write_bytes((demo_base / name).read_bytes())
    errors = refusal("--model", hollow, "--data-dir", tmp_path / "data", "--port", 0, "--admin-port", 0)
    assert "the engine did not start" in errors
