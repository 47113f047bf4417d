"""A Ray cluster of this machine, which `loramux cluster up` starts and `loramux cluster down` stops."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from loramux.admin.errors import StartRefused
from loramux.engine.device.machine_limits import num_cpus
from loramux.platform.cluster.ray_connection import EQUAL_PRIORITY, LOOPBACK_ONLY, QUIET
from loramux.platform.cluster.spare_worker import PRELOADED

HEAD_NAME = "head.json"
TOKEN_NAME = "token"  # noqa: S105 - a file's name
LOG_NAME = "head.log"
HOST = "127.0.0.1"
NUM_CPUS = "1"
"""CPUs that Ray believes to have. Replicas reserve none. Ray keeps at most this number of idle processes."""
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
LOG_LINES = 20
"""Number of lines of Ray's log in the message of a failed start."""
OBJECT_STORE_BYTES = 128 << 20
"""Memory of Ray's object store. Replicas keep nothing in it."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The process that runs the cluster. `started` tells it apart from a later process with the same identifier."""

    pid: int
    started: str
    port: int
    temp_dir: str

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"


class LocalCluster:
    """The cluster whose files are in `directory`, which only this user can read.

    Ray's processes listen on 127.0.0.1 only, and accept only processes that know the token in `directory`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs in its environment before it imports Ray, in order to join the cluster."""
        token = self._directory.absolute() / TOKEN_NAME
        return {**LOOPBACK_ONLY, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}

    def head(self) -> Head | None:
        """Return the running head, or None if there is none."""
        try:
            head = msgspec.json.decode((self._directory / HEAD_NAME).read_bytes(), type=Head)
        except (OSError, msgspec.MsgspecError):
            return None
        return head if _started(head.pid) == head.started else None

    def start(self, num_gpus: int) -> Head:
        """Start the head, unless it runs. Blocks until it listens. Raises StartRefused."""
        head = self.head()
        if head is not None:
            return head
        self._clean()
        # Another cluster may use Ray's own choice.
        ports = _free_ports(4)
        self.prepare()
        # Ray puts sockets there, whose paths must be short.
        temp_dir = tempfile.mkdtemp(prefix="loramux-ray-")
        command = (
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            *("--node-ip-address", HOST, "--port", str(ports[0]), "--temp-dir", temp_dir),
            *("--ray-client-server-port", str(ports[1]), "--dashboard-agent-listen-port", str(ports[2])),
            *("--dashboard-port", str(ports[3])),
            *("--num-cpus", NUM_CPUS, "--num-gpus", str(num_gpus)),
            *("--object-store-memory", str(OBJECT_STORE_BYTES), "--include-dashboard", "false"),
        )
        # By default, Ray starts at most NUM_CPUS processes at once.
        at_once = {"RAY_worker_maximum_startup_concurrency": str(num_cpus())}
        with (self._directory / LOG_NAME).open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - the command is fixed
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **QUIET, **EQUAL_PRIORITY, **PRELOADED, **at_once, **self.environment},
            )
        head = Head(pid=process.pid, started=_started(process.pid) or "", port=ports[0], temp_dir=temp_dir)
        (self._directory / HEAD_NAME).write_bytes(msgspec.json.encode(head))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_up(head):
            if process.poll() is not None or time.monotonic() > deadline_s:
                with suppress(ProcessLookupError):
                    # Processes of the head's group outlive it for a while.
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._clean()
                log = self._directory / LOG_NAME
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                raise StartRefused("\n".join((f"Ray did not start; the end of {log}:", *lines)))
            time.sleep(POLL_S)
        return head

    def prepare(self) -> None:
        """Create the directory and a new token, which only this user can read."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory.chmod(0o700)
        token = self._directory / TOKEN_NAME
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))

    def stop(self) -> bool:
        """End the head and everything that it has started. Return False if there was no head. Blocks."""
        head = self.head()
        if head is None:
            self._clean()
            return False
        # The head leads a process group. Ray's node manager, in the group, ends the replicas.
        with suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while _started(head.pid) == head.started:
            if time.monotonic() > deadline_s:
                with suppress(ProcessLookupError):
                    os.killpg(head.pid, signal.SIGKILL)
            time.sleep(POLL_S)
        self._clean()
        return True

    def _clean(self) -> None:
        """Remove the files of a head that has ended."""
        with suppress(OSError, msgspec.MsgspecError):
            head = msgspec.json.decode((self._directory / HEAD_NAME).read_bytes(), type=Head)
            shutil.rmtree(head.temp_dir, ignore_errors=True)
        for name in (HEAD_NAME, TOKEN_NAME):
            # The data directory can be a file.
            with suppress(FileNotFoundError, NotADirectoryError):
                (self._directory / name).unlink()

    def _is_up(self, head: Head) -> bool:
        # Ray writes this line last.
        is_told = b"--block" in (self._directory / LOG_NAME).read_bytes()
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return is_told and probe.connect_ex((HOST, head.port)) == 0


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def _started(pid: int) -> str | None:
    """Return when the process was started, in the kernel's clock ticks, or None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
