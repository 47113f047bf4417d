"""The demo's server, with a script in place of the child process."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from loramux.admin.demo import server as demo
from loramux.admin.demo.server import DemoFailed, DemoServer
from loramux.admin.demo.started_server import demo_server
from loramux.admin.exit_codes import REFUSED, WRONG_CALL
from tests.adapter_store.waiting import wait_until

LINES = "".join(f"echo line {number}\n" for number in range(100))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the child process runs. The demo's temporary directories are in `tmp_path`."""
    path = tmp_path / "child"
    path.touch(mode=0o700)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return path


def failed_start(data_dir: Path | None, log: str) -> DemoFailed:
    """Wait in vain for a server whose log gets to contain `log`."""

    def wait(server: DemoServer) -> None:
        wait_until(lambda: log in server.log.read_text())
        server.wait_until(lambda: False, "ready")

    with (
        pytest.raises(DemoFailed) as caught,
        demo_server(Path("model"), "demo-base", None, None, data_dir, "cpu") as server,
    ):
        wait(server)
    return caught.value


@pytest.mark.parametrize("is_temporary", [True, False], ids=["temporary", "given"])
@pytest.mark.parametrize(
    ("end", "what"),
    [("exit 7", "the server ended with exit code 7"), ("exec sleep 60", "the server is not ready after 0 s")],
    ids=["ended", "not in time"],
)
def test_failed_start_shows_the_end_of_the_log_and_keeps_all_of_it(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, what: str, is_temporary: bool
) -> None:
    script.write_text(f"#!/bin/sh\n{LINES}{end}\n")
    if "sleep" in end:
        monkeypatch.setattr(demo, "START_TIMEOUT_S", 0.0)
    error = failed_start(None if is_temporary else tmp_path / "data", "line 99\n")
    lines = str(error).splitlines()
    assert error.exit_code == REFUSED
    assert lines[:-1] == [what, *(f"line {number}" for number in range(80, 100))]
    said, _, log = lines[-1].rpartition(" ")
    assert said == "the server's whole log is in"
    assert Path(log).read_text().splitlines() == [f"line {number}" for number in range(100)]
    # Only the log is left of a temporary directory.
    assert [path.name for path in tmp_path.glob("loramux-demo-*")] == ([Path(log).name] if is_temporary else [])


def test_refused_start_shows_only_its_message(script: Path, tmp_path: Path) -> None:
    script.write_text("#!/bin/sh\necho loramux: the port is in use\nexit 2\n")
    error = failed_start(None, "in use\n")
    assert (str(error), error.exit_code) == ("the port is in use", WRONG_CALL)
    assert list(tmp_path.glob("loramux-demo-*")) == []
