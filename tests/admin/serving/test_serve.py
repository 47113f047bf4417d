from __future__ import annotations

import json
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.adapter_store.sandbox.confinement import CALLS, FILES
from loramux.adapter_store.validation.validator import missing_measures
from loramux.engine.device.cuda_driver import count_gpus
from tests.adapter_store.sandbox import lesser_kernel

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")} | {
    "PYTHONPATH": ".src",
    # If two processes both use every core, each runs at far less than half its speed.
    "LORAMUX_NUM_THREADS": "1",
}


def serve(*arguments: object, lacking: str = "", **variables: str) -> subprocess.Popen[str]:
    """`lacking` names a sandbox feature to hide from the server."""
    python = [sys.executable, lesser_kernel.__file__, lacking] if lacking else [sys.executable]
    return subprocess.Popen(
        [*python, "-m", "loramux.admin.cli", "serve", *(str(argument) for argument in arguments)],
        env={**ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Server:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip())
            if len(self.lines) >= 4:
                break
        else:
            raise AssertionError(process.stderr.read() if process.stderr else "")
        self.url = self.lines[1].split()[-1].removesuffix("/v1")
        self.admin_url = self.lines[2].split()[-1]

    def ended(self) -> tuple[int, str, str]:
        """Wait until the server exits. Return its exit code and the remaining stdout and stderr."""
        output, errors = self.process.communicate(timeout=40)
        return self.process.returncode, output, errors


Start = Callable[..., Server]


@pytest.fixture
def start(demo_base: Path, tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def begin(*arguments: object, **variables: str) -> Server:
        ports = ("--port", 0, "--admin-port", 0)
        processes.append(serve("--model", demo_base, "--data-dir", tmp_path / "data", *ports, *arguments, **variables))
        return Server(processes[-1])

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ask(http: httpx.Client, server: Server, secret: str, prompts: list[str], max_tokens: int) -> Any:
    """Start a streamed call to the base model that stops only at the token limit."""
    body = {"model": "base", "prompt": prompts, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {secret}"}
    return http.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers)


@pytest.mark.campaign
def test_stopped_server_drains_and_the_next_one_reports_its_usage(
    start: Start, demo_base: Path, tmp_path: Path
) -> None:
    first = start()
    assert first.lines[0].startswith("loramux serves base (cpu, ")
    shown = first.process.stdout.readline().split()  # type: ignore[union-attr]
    assert shown[:2] == ["admin", "key"], "the first start prints an administrator's key"
    operator = {"authorization": f"Bearer {shown[2]}"}
    told = [first.process.stdout.readline() for _ in range(7)]  # type: ignore[union-attr]
    assert f"  export LORAMUX_ADMIN_URL={first.admin_url} LORAMUX_ADMIN_KEY={shown[2]}\n" in told
    twice = refusal("--model", demo_base, "--data-dir", tmp_path / "data", "--port", 0, "--admin-port", 0)
    assert "another loramux process uses the data directory" in twice
    with httpx.Client(trust_env=False, timeout=30) as http:
        assert http.get(f"{first.url}/health/ready").status_code == 200
        http.post(f"{first.admin_url}/admin/v1/tenants", json={"slug": "acme"}, headers=operator)
        key = http.post(f"{first.admin_url}/admin/v1/api_keys", json={"tenant": "acme"}, headers=operator).json()
        with ask(http, first, key["secret"], ["Hello"], 100) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            first.process.send_signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]", "a running request is drained"
        code, _, errors = first.ended()
        assert code == 0, errors
        assert "Traceback" not in errors

        second = start()
        usage = http.get(f"{second.admin_url}/admin/v1/usage", headers=operator).json()
        assert usage["data"][0]["results"][0]["completion_tokens"] == 100
        (base,) = http.get(f"{second.admin_url}/admin/v1/bases", headers=operator).json()["data"]
        assert [server["state"] for server in base["servers"]] == ["serving"], "the first server has left"
        deadline = time.monotonic() + 20
        # The request takes so long that only a forced stop can end it quickly.
        with ask(http, second, key["secret"], ["Hi"] * 64, 1000) as response:
            next(response.iter_lines())
            second.process.send_signal(signal.SIGTERM)
            while http.get(f"{second.admin_url}/health/ready").status_code != 503:
                assert time.monotonic() < deadline
            started = time.monotonic()
            second.process.send_signal(signal.SIGTERM)
            code, output, errors = second.ended()
        assert code == 0, errors
        assert time.monotonic() - started < 10
        assert "sk-lmx-" not in output, "the key is shown once"
        assert "tenants create" not in output, "a server with tenants needs no advice"


@pytest.mark.campaign
def test_responses_in_the_background_are_settled_before_a_stopped_server_ends(start: Start, tmp_path: Path) -> None:
    """They have no connection that could hold up the stop, and run for longer than the server waits for them."""
    server = start("--data-parallel-size", 2, LORAMUX_NUM_THREADS="2", LORAMUX_RESPONSE_KEY="k" * 40)
    shown = server.process.stdout.readline().split()  # type: ignore[union-attr]
    operator = {"authorization": f"Bearer {shown[2]}"}
    body = {"model": "base", "input": "Hi", "background": True, "store": True, "max_output_tokens": 1000}
    with httpx.Client(trust_env=False, timeout=30) as http:
        tenants = f"{server.admin_url}/admin/v1/tenants"
        made = http.post(tenants, json={"slug": "acme"}, headers=operator)
        matching = {**operator, "if-match": made.headers["etag"]}
        http.patch(f"{tenants}/acme", json={"response_days": 1}, headers=matching).raise_for_status()
        key = http.post(f"{server.admin_url}/admin/v1/api_keys", json={"tenant": "acme"}, headers=operator).json()
        secret = {"authorization": f"Bearer {key['secret']}"}
        for _ in range(64):
            answer = http.post(f"{server.url}/v1/responses", json=body | {"ignore_eos": True}, headers=secret)
            assert answer.status_code == 200, answer.text
    server.process.send_signal(signal.SIGTERM)
    code, _, errors = server.ended()
    assert code == 0, errors
    assert "Traceback" not in errors
    with sqlite3.connect(tmp_path / "data" / "loramux.db") as database:
        states = database.execute("select state, count(*) from reservations group by state").fetchall()
    assert not [one for one in states if one[0] == "open"], states


def refusal(*arguments: object, lacking: str = "", **variables: str) -> str:
    process = serve(*arguments, lacking=lacking, **variables)
    output, errors = process.communicate(timeout=150)
    assert process.returncode == 2, errors
    assert output == ""
    assert "Traceback" not in errors
    return errors


SEVERAL_STARTS = """
import json, sys
from typer.testing import CliRunner
from loramux.admin.cli import app

for line in sys.stdin:
    done = CliRunner().invoke(app, ["serve", *json.loads(line)])
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)
"""


@pytest.fixture(scope="module")
def refused() -> Iterator[Callable[..., str]]:
    """Returns what a server that is refused prints. All are started in one process, which imports everything once."""
    command = [sys.executable, "-c", SEVERAL_STARTS]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None
        assert answers is not None

        def refused(*arguments: object) -> str:
            asked.write(json.dumps([str(argument) for argument in arguments]) + "\n")
            asked.flush()
            # A server that starts would never answer.
            assert select.select([answers], [], [], 150)[0], f"serve {arguments} is not refused"
            code, output, errors = json.loads(answers.readline())
            assert (code, output) == (2, ""), errors
            assert "Traceback" not in errors
            return str(errors)

        try:
            yield refused
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the measures need Linux")
@pytest.mark.parametrize("measure", [FILES, pytest.param(CALLS, marks=pytest.mark.campaign)])
def test_missing_required_sandbox_is_refused(demo_base: Path, tmp_path: Path, measure: str) -> None:
    if CALLS in missing_measures():
        pytest.skip("this machine cannot imitate a lesser one")
    arguments = ("--model", demo_base, "--data-dir", tmp_path / "data", "--port", 0, "--admin-port", 0)
    errors = refusal(*arguments, lacking=measure, LORAMUX_SANDBOX="required")
    assert errors == (
        f"loramux: the setting sandbox is 'required', and this machine's kernel or container has no {measure}: "
        "'loramux doctor --data-dir DIR' says how to fix it\n"
    )
    assert not (tmp_path / "data").exists()


def test_port_in_use_is_refused(refused: Callable[..., str], demo_base: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        errors = refused("--model", demo_base, "--data-dir", tmp_path / "data", "--port", 0, "--admin-port", port)
    assert errors == (
        f"loramux: cannot listen on 127.0.0.1 port {port}: address already in use; choose another with --admin-port\n"
    )
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("--model", "/nowhere"), "there is no directory /nowhere", id="no model"),
        pytest.param(("--model", "MODEL", "--dtype", "int3"), "int3", id="dtype"),
        pytest.param(("--model", "MODEL", "--host", "no-such-host.invalid"), "no-such-host.invalid", id="host"),
        pytest.param(("--model", "MODEL", "--data-dir", "/proc/nowhere"), "data directory /proc/nowhere", id="data"),
    ],
)
def test_invalid_setup_is_refused_with_one_sentence(
    refused: Callable[..., str], demo_base: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    given = [str(demo_base) if argument == "MODEL" else argument for argument in arguments]
    if "--data-dir" not in given:
        given += ["--data-dir", str(tmp_path / "data")]
    assert said in refused(*given, "--port", 0, "--admin-port", 0)


def test_a_model_without_weights_is_refused(refused: Callable[..., str], demo_base: Path, tmp_path: Path) -> None:
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (hollow / name).write_bytes((demo_base / name).read_bytes())
    errors = refused("--model", hollow, "--data-dir", tmp_path / "data", "--port", 0, "--admin-port", 0)
    assert f"the weights in {hollow} cannot be read" in errors


@pytest.mark.skipif(count_gpus() > 0, reason="this machine has a GPU")
def test_a_missing_gpu_is_refused_with_one_sentence(
    refused: Callable[..., str], demo_base: Path, tmp_path: Path
) -> None:
    errors = refused(
        "--model", demo_base, "--data-dir", tmp_path / "data", "--port", 0, "--admin-port", 0, "--device", "cuda"
    )
    assert errors == (
        "loramux: the device 'cuda' needs an NVIDIA GPU and its driver, but no usable GPU was found: use --device cpu\n"
    )
    assert not (tmp_path / "data").exists()
