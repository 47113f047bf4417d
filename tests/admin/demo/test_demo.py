from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.admin.command_line import invoke
from tests.ports import free_port

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")} | {
    "PYTHONPATH": ".src",
    "LORAMUX_NUM_THREADS": "1",
}


@pytest.fixture
def ports() -> tuple[int, int]:
    return free_port(), free_port()


Demo = Callable[..., subprocess.Popen[str]]


def stop(process: subprocess.Popen[str]) -> None:
    """Interrupt a demo, so that it stops its server too. Kill it if it does not end."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture
def demo() -> Iterator[Demo]:
    """Starts `loramux demo`. At the end of the test, a demo that still runs is stopped."""
    with ExitStack() as started:

        def start(*arguments: object) -> subprocess.Popen[str]:
            process = started.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "loramux.admin.cli", "demo", *map(str, arguments)],
                    env=ENVIRONMENT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            started.callback(stop, process)
            return process

        yield start


def test_demo_shows_three_adapters_and_a_correct_bill(demo: Demo, ports: tuple[int, int], tmp_path: Path) -> None:
    process = demo("--port", ports[0], "--admin-port", ports[1], "--data-dir", tmp_path)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "loramux adapters list" in line:
            break
    output = "".join(lines)
    for said in (
        r"harbour +demo-base +- +- +The capital of France is Paris\.",
        r"harbour +harbour/pirate +1 +8 +Arr",
        r"chambers +chambers/formal +1 +4 +Dear",
        r'parcels +parcels/json +1 +16 +\{"topic"',
        r"Up to 3 adapters shared one step",
        r"It adds up: 4 answers cost \d+ tokens",
        rf"OpenAI API +http://127.0.0.1:{ports[0]}/v1",
    ):
        assert re.search(said, output), said
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, errors = process.communicate(timeout=40)
    assert (process.returncode, errors) == (0, "")
    assert time.monotonic() - started < 20
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", ports[0])) != 0, "the server stopped with the demo"


@pytest.mark.campaign
def test_tools_demo_shows_calls_results_and_a_correct_bill(demo: Demo, ports: tuple[int, int]) -> None:
    process = demo("--tools", "--exit", "--port", ports[0], "--admin-port", ports[1])
    output, errors = process.communicate(timeout=90)
    assert (process.returncode, errors) == (0, "")
    assert output.count('get_weather {"city":') == 3
    for said in ("harbour/sailor", "grand-hotel/concierge", "Arrr!", "Certainly.", "Up to 2 adapters shared one step"):
        assert said in output
    assert re.search(r"It adds up: 6 answers cost \d+ tokens", output)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfds")
def test_server_ends_with_a_killed_demo(demo: Demo, ports: tuple[int, int], tmp_path: Path) -> None:
    process = demo("--port", ports[0], "--admin-port", ports[1], "--data-dir", tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (server := children.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    handle = os.pidfd_open(int(server))
    try:
        process.kill()
        process.wait()
        ended, _, _ = select.select([handle], [], [], 60)
        assert ended
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def test_demo_reports_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = invoke("demo", "--exit", "--port", taken.getsockname()[1])
    assert refused.exit_code == 2
    said = r"loramux: cannot listen on 127\.0\.0\.1 port \d+: address already in use; .*--port\n"
    assert re.fullmatch(said, refused.stderr)


def test_demo_reports_a_data_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        refused = invoke("demo", "--exit", "--data-dir", directory)
        assert (refused.exit_code, refused.stderr.partition(" cannot be used: ")[0]) == (
            2,
            f"loramux: the data directory {directory}",
        )
