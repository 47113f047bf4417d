from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from tests.admin.command_line import invoke
from tests.ports import free_port

LORAMUX = [sys.executable, "-m", "loramux.admin.cli"]
SHOWN_LOG = 4000
"""Most characters of the log in the message of a failed start."""


class PlainHttp(httpx.Client):
    """A client without certificates, which take longer to load than most calls take. Like a client that OpenAI's
    library makes, it closes itself.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(trust_env=False, verify=False, **options)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Deployment:
    model: Path
    data_dir: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]
    port: int
    admin_port: int
    admin_key: str

    def client(self, api_key: str) -> OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return OpenAI(base_url=url, api_key=api_key, max_retries=0, http_client=PlainHttp(timeout=60.0))

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `loramux` in this process, because starting another takes far longer than most commands."""
        environment = {
            "LORAMUX_ADMIN_URL": f"http://127.0.0.1:{self.admin_port}",
            "LORAMUX_ADMIN_KEY": self.admin_key,
        }
        done = invoke(*arguments, env=environment, catch_exceptions=False)
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    def json(self, *arguments: str) -> Any:
        done = self.command(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @contextmanager
    def running(self, log_file: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        """Run the server during the block, and stop it afterwards. Append its log to `log_file`, if given."""
        log = subprocess.STDOUT if log_file is None else os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        server = subprocess.Popen(
            [
                *(*LORAMUX, "serve", "--model", str(self.model), "--data-dir", str(self.data_dir)),
                *("--port", str(self.port), "--admin-port", str(self.admin_port), "--served-name", "demo-base"),
                *self.arguments,
            ],
            env={**self.environment, "LORAMUX_ADMIN_KEY": self.admin_key},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        if log_file is not None:
            os.close(log)
        try:
            self._wait_until_ready(server, log_file)
            yield server
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            try:
                server.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.communicate()
                raise

    def _wait_until_ready(self, server: subprocess.Popen[str], log_file: Path | None) -> None:
        deadline, http = time.monotonic() + 300, PlainHttp()
        while server.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if http.get(f"http://127.0.0.1:{self.port}/health/ready").status_code == 200:
                    return
            time.sleep(0.05)
        what = "the server was not ready in time" if server.poll() is None else "the server ended"
        # A server that hangs would not end otherwise.
        server.kill()
        output = server.communicate(timeout=60)[0] + ("" if log_file is None else log_file.read_text())
        raise AssertionError(f"{what}; the end of its log:\n{output[-SHOWN_LOG:]}")


def deployment(model: Path, data_dir: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> Deployment:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}
    paths = os.pathsep.join(path for path in sys.path if path)
    return Deployment(
        model=model,
        data_dir=data_dir,
        arguments=arguments,
        # Two processes that both use every core run at far less than half their speed.
        environment={**inherited, "PYTHONPATH": paths, "LORAMUX_NUM_THREADS": "1", **environment},
        port=free_port(),
        admin_port=free_port(),
        admin_key=secrets.token_hex(24),
    )
