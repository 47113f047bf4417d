from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.errors import ValidationFailed
from loramux.adapter_store.sandbox import confinement
from loramux.adapter_store.sandbox.fork_server import worker_environment
from loramux.adapter_store.validation.validator import missing_measures
from tests.adapter_store.sandbox import lesser_kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandbox measures require Linux")

_PRELUDE = """
import ctypes, json, os, signal, socket, sys
from pathlib import Path
from loramux.adapter_store.sandbox import confinement
scratch, outside, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
def attempt(action):
    try:
        return ["done", repr(action())]
    except OSError as error:
        return ["refused", error.errno]
def own_file():
    return os.open(scratch / "input", os.O_RDONLY)
def queue_signal(pid):
    libc, number = ctypes.CDLL(None, use_errno=True), {"x86_64": 129, "aarch64": 138}[os.uname().machine]
    if libc.syscall(number, pid, 0, ctypes.create_string_buffer(128)) != 0:
        raise OSError(ctypes.get_errno(), "")
def connect(family=socket.AF_INET, address="127.0.0.1"):
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(2)
        one.connect((address, port))
"""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "secret").write_text("secret")
    return directory


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    directory = tmp_path / "scratch"
    directory.mkdir()
    (directory / "input").write_text("input")
    return directory


@pytest.fixture
def port() -> Any:
    """The port of a listener on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)

        def accept() -> None:
            try:
                while True:
                    listener.accept()[0].close()
            except OSError:
                pass

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]


def run_confined(
    code: str, scratch: Path, outside: Path, port: int, before: str = "confinement.confine([scratch])"
) -> Any:
    """Run `code` in a new process that sandboxes itself first, and return the value of `result`."""
    program = f"{_PRELUDE}\nmissing = {before}\n{code}\nprint(json.dumps(result))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, scratch, outside, str(port)],
        env=worker_environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def lacking() -> set[str]:
    """The sandbox measures that this machine lacks. Tests of these measures are skipped."""
    return set(missing_measures())


@pytest.mark.parametrize(
    "measures",
    [
        (confinement.FILES,),
        (confinement.CALLS,),
        (confinement.NETWORK,),
        (confinement.NETWORK, confinement.FILES, confinement.CALLS),
    ],
    ids=",".join,
)
def test_missing_measures_are_detected(lacking: set[str], measures: tuple[str, ...]) -> None:
    if confinement.CALLS in lacking:
        pytest.skip("this machine cannot simulate a lesser kernel")
    probe = (
        sys.executable,
        lesser_kernel.__file__,
        ",".join(measures),
        "-m",
        "loramux.adapter_store.sandbox.confinement",
    )
    assert set(missing_measures(probe)) == lacking | set(measures)


@pytest.mark.parametrize(
    "code", ["raise SystemExit(1)", "print('x')", "print([1])"], ids=["fails", "no JSON", "number"]
)
def test_untestable_sandbox_raises_validation_failed(code: str) -> None:
    with pytest.raises(ValidationFailed, match="cannot be tested"):
        missing_measures((sys.executable, "-c", code))


def test_connection_works_outside_the_sandbox_and_fails_inside(scratch: Path, outside: Path, port: int) -> None:
    code = "result = attempt(connect)"
    assert run_confined(code, scratch, outside, port, before="[]")[0] == "done"
    assert run_confined(code, scratch, outside, port)[0] == "refused"


@pytest.mark.parametrize(
    ("measure", "before"),
    [
        pytest.param(
            confinement.NETWORK,
            "ctypes.CDLL(None).unshare(confinement._NEW_NETWORK) and ctypes.CDLL(None).unshare(0x50000000)",
            id="a network of its own",
        ),
        pytest.param(
            confinement.CALLS,
            "confinement.refuse_calls([ctypes.CDLL(None), ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)][0])",
            id="seccomp",
        ),
        pytest.param(
            confinement.FILES,
            "confinement.restrict_files([ctypes.CDLL(None), ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)][0], [], [])",
            id="landlock",
        ),
    ],
)
def test_each_measure_alone_blocks_the_network(
    scratch: Path, outside: Path, port: int, lacking: set[str], measure: str, before: str
) -> None:
    if measure in lacking:
        pytest.skip(f"this machine has no {measure}")
    assert run_confined("result = attempt(connect)", scratch, outside, port, before)[0] == "refused"


@pytest.mark.parametrize(
    ("measure", "action"),
    [
        pytest.param(confinement.FILES, "(outside / 'secret').read_text()", id="read a file elsewhere"),
        pytest.param(confinement.FILES, "Path('/etc/passwd').read_text()", id="read a file of the system"),
        pytest.param(confinement.FILES, "(outside / 'new').write_text('x')", id="write a file elsewhere"),
        pytest.param(confinement.FILES, "(outside / 'secret').unlink()", id="delete a file elsewhere"),
        pytest.param(confinement.FILES, "os.listdir(outside)", id="list a directory elsewhere"),
        pytest.param(confinement.CALLS, "os.symlink('/etc/passwd', scratch / 'link')", id="make a link"),
        pytest.param(confinement.CALLS, "os.link(scratch / 'input', scratch / 'link')", id="make a hard link"),
        pytest.param(confinement.CALLS, "os.mkfifo(scratch / 'pipe')", id="make a pipe"),
        pytest.param(confinement.CALLS, "os.truncate(scratch / 'input', 0)", id="cut a file by its name"),
        pytest.param(confinement.CALLS, "os.fork()", id="start a process"),
        pytest.param(confinement.CALLS, "os.execv(sys.executable, [sys.executable, '-V'])", id="run a program"),
        pytest.param(confinement.CALLS, "os.kill(os.getppid(), 0)", id="signal the server"),
        pytest.param(confinement.CALLS, "signal.pidfd_send_signal(0, 0)", id="signal through a descriptor"),
        pytest.param(
            confinement.CALLS,
            "queue_signal(os.getppid())",
            id="queue a signal for the server",
        ),
        pytest.param(confinement.CALLS, "os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)", id="slow the server down"),
        pytest.param(
            confinement.CALLS, "os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))", id="move the server"
        ),
        pytest.param(confinement.CALLS, "os.chmod(outside / 'secret', 0o777)", id="change a mode elsewhere"),
        pytest.param(confinement.CALLS, "os.fchmod(own_file(), 0o777)", id="change the mode of an open file"),
        pytest.param(confinement.CALLS, "os.fchown(own_file(), -1, -1)", id="change the owner of an open file"),
        pytest.param(confinement.CALLS, "os.setxattr(own_file(), 'user.a', b'b')", id="set an attribute of a file"),
        pytest.param(confinement.CALLS, "os.utime(outside / 'secret')", id="change times elsewhere"),
        pytest.param(
            confinement.CALLS, "os.setxattr(outside / 'secret', 'user.a', b'b')", id="set an attribute elsewhere"
        ),
        pytest.param(confinement.CALLS, "os.setsid()", id="leave its process group"),
        pytest.param(confinement.CALLS, "os.memfd_create('x')", id="memory that is not counted"),
        pytest.param(confinement.CALLS, "socket.socket(socket.AF_UNIX)", id="a socket of another kind"),
        pytest.param(confinement.CALLS, "socket.socketpair()", id="a pair of sockets"),
    ],
)
def test_forbidden_actions_are_refused(
    scratch: Path, outside: Path, port: int, lacking: set[str], measure: str, action: str
) -> None:
    if measure in lacking:
        pytest.skip(f"this machine has no {measure}")
    outcome, found = run_confined(f"result = attempt(lambda: {action})", scratch, outside, port)
    assert (outcome, found in (1, 13)) == ("refused", True)
    assert (outside / "secret").read_text() == "secret"
    assert sorted(path.name for path in scratch.iterdir()) == ["input"]


def test_own_files_are_accessible(scratch: Path, outside: Path, port: int) -> None:
    code = """
(scratch / "output").write_text((scratch / "input").read_text() + " and output")
(scratch / "output").open("r+").truncate(5)
import wave  # a module that has not been loaded
result = (scratch / "output").read_text()
"""
    assert run_confined(code, scratch, outside, port) == "input"


def test_process_has_no_privileges_and_leaves_no_core_dump(
    scratch: Path, outside: Path, port: int, lacking: set[str]
) -> None:
    if confinement.PRIVILEGES in lacking:
        pytest.skip("this machine cannot forbid new privileges")
    code = """
libc, capabilities = ctypes.CDLL(None), ctypes.create_string_buffer(24)
libc.capget((0x20080522).to_bytes(4, "little") + bytes(4), capabilities)
result = [libc.prctl(39, 0, 0, 0, 0), capabilities.raw == bytes(24), core_limit]
"""
    before = """confinement.limit_resources(1 << 32, 1 << 20, 10)
import resource
core_limit = resource.getrlimit(resource.RLIMIT_CORE)
confinement.confine([scratch])
"""
    assert run_confined(code, scratch, outside, port, before) == [1, True, [0, 0]]


def test_number_of_open_descriptors_is_limited(scratch: Path, outside: Path, port: int) -> None:
    code = """
files = []
def open_many():
    while True:
        files.append(open(scratch / "input"))
outcome = attempt(open_many)
result = [outcome, len(files) < 32]
"""
    before = "confinement.limit_resources(1 << 32, 1 << 20, 10)"
    assert run_confined(code, scratch, outside, port, before) == [["refused", 24], True]


def test_process_dies_with_the_server(scratch: Path) -> None:
    """The kernel kills the process when the thread that started it exits."""
    child = (
        "import time; from loramux.adapter_store.sandbox import confinement; confinement.confine([]);"
        " print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys;"
        f" child = subprocess.Popen([sys.executable, '-P', '-c', {child!r}], stdout=subprocess.PIPE, text=True);"
        " print(child.stdout.readline().strip(), child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", parent], env=worker_environment(), capture_output=True, text=True, timeout=60
    )
    ready, pid_text = done.stdout.split()
    assert ready == "ready"
    pid = int(pid_text)
    for _ in range(6000):
        try:
            # A process that has exited but has not been reaped is a zombie.
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        threading.Event().wait(0.01)
    os.kill(pid, 9)
    pytest.fail("the process outlived its parent")
