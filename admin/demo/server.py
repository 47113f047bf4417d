"""The demo's server: an ordinary `loramux serve` in a child process, which ends with the demo."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from loramux.admin.client.client import AdminClient
from loramux.admin.exit_codes import REFUSED, WRONG_CALL

POLL_S = 0.05
WATCH_S = 0.5
START_TIMEOUT_S = 900.0
"""The first start compiles kernels, which takes minutes on few cores."""

PATIENCE_S = 10.0
"""Time, in seconds, after which the demo shows what the server has logged last."""

GPU_POOL_BYTES = "1GiB"
"""Pool size on a GPU, the same as on a CPU. By default, the pool would take all of the GPU's free memory."""

STOP_TIMEOUT_S = 45.0
HURRY_TIMEOUT_S = 10.0
LOG_LINES = 20


class DemoFailed(Exception):
    """The demo cannot continue. The message says why."""

    def __init__(self, message: str, exit_code: int = REFUSED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DemoServer:
    def __init__(
        self,
        model: Path,
        data_dir: Path,
        port: int,
        admin_port: int,
        served_name: str,
        more: Sequence[str] = (),
        device: str = "cpu",
    ) -> None:
        """Start the server. `more` contains additional arguments for `loramux serve`.

        Raises DemoFailed if the data directory cannot be used.
        """
        self.admin_key = secrets.token_urlsafe(32)
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self.log = data_dir / "serve.log"
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            self.log.touch()
        except OSError as error:
            raise DemoFailed(f"the data directory {data_dir} cannot be used: {error.strerror}", WRONG_CALL) from None
        arguments = ["--model", str(model), "--data-dir", str(data_dir), "--served-name", served_name]
        arguments += ["--device", device]
        ports = ["--port", str(port), "--admin-port", str(admin_port)]
        # The demo must not depend on settings in the user's environment.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}
        environment["LORAMUX_ADMIN_KEY"] = self.admin_key
        if device != "cpu":
            environment["LORAMUX_POOL_BYTES"] = GPU_POOL_BYTES
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "loramux.admin.demo.child", "serve", *arguments, *ports, *more],
                # This pipe closes even if the demo is killed, and the server then stops.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C must reach only the demo, which then lets the server drain.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def client(self) -> AdminClient:
        return AdminClient(self.admin_url, self.admin_key)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Poll until `is_so()` is true. Raises DemoFailed, with the end of the log, after an exit or a timeout."""
        started = time.monotonic()
        has_shown = False
        while not is_so():
            self.check()
            waited_s = time.monotonic() - started
            if waited_s > START_TIMEOUT_S:
                raise DemoFailed(f"the server is not {what} after {START_TIMEOUT_S:.0f} s\n{self._last_words()}")
            if waited_s > PATIENCE_S and not has_shown:
                has_shown = True
                print(f"  the server is not {what} yet. Its log ends with:\n{self._last_words(1)}", flush=True)
            time.sleep(POLL_S)

    def check(self) -> None:
        code = self._process.poll()
        if code == WRONG_CALL:
            # The server has already printed why it cannot start.
            raise DemoFailed(self._last_words().replace("loramux: ", ""), WRONG_CALL)
        if code is not None:
            raise DemoFailed(f"the server ended with exit code {code}\n{self._last_words()}")

    def watch(self) -> None:
        """Return never, unless the server ends. Raises DemoFailed then."""
        while True:
            self.check()
            time.sleep(WATCH_S)

    def stop(self) -> None:
        """Let running requests finish and wait for the process to exit. Ctrl-C during the wait cuts the drain short."""
        with self._process:
            for limit_s in (STOP_TIMEOUT_S, HURRY_TIMEOUT_S):
                if self._process.poll() is not None:
                    return
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    self._process.wait(limit_s)
            self._process.kill()

    def _last_words(self, num_lines: int = LOG_LINES) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])
