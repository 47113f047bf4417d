"""A real Prometheus server on loopback.

`python -m tests.conformance.prometheus_server` installs Debian's package if it is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.ports import free_port

PACKAGE, PROGRAMS = "prometheus", ("prometheus", "promtool")
DEPLOY = Path(__file__).parents[2] / "platform" / "deploy"
_START_S = 30


class PrometheusMissing(Exception):
    """Prometheus is missing and cannot be installed automatically. The message says how to install it."""


class Prometheus:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The current samples of an expression. Raises AssertionError with the reason if Prometheus refuses it."""
        answer = self._http.get("/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        return list(answer["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._http.get("/rules").json()["data"]["groups"] for rule in group["rules"]]

    def targets(self) -> list[dict[str, Any]]:
        return list(self._http.get("/targets").json()["data"]["activeTargets"])


@contextmanager
def running_prometheus(directory: Path, target: str, token: str) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes `target` every second, with the shipped configuration and rules."""
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", directory)
    (directory / "token").write_text(token)
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    config = config.replace("/etc/prometheus/loramux-token", str(directory / "token"))
    config = config.replace("127.0.0.1:8001", target)
    config = re.sub(r"_interval: \d+s", "_interval: 1s", config)
    (directory / "prometheus.yml").write_text(config)
    port = free_port()
    command = [
        *("prometheus", f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
    ]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _START_S
        while not _is_ready(url):
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, f"not ready in time\n{(directory / 'log').read_text()}"
            time.sleep(0.2)
        with httpx.Client(base_url=f"{url}/api/v1", trust_env=False, timeout=10) as http:
            yield Prometheus(http)
    finally:
        process.terminate()
        process.wait(30)


def promtool(*arguments: object) -> str:
    """Run promtool and return its output. Raises AssertionError if promtool fails."""
    command = ["promtool", *(str(argument) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install() -> None:
    """Install the package if it is missing. Raises PrometheusMissing if the installation is not permitted or fails."""
    if all(shutil.which(program) for program in PROGRAMS):
        return
    remedy = f"on Debian 12 install it as root with `apt-get install --no-install-recommends {PACKAGE}`"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise PrometheusMissing(f"{PACKAGE} is missing; {remedy}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", PACKAGE]):
        done = subprocess.run(["apt-get", "--quiet", *arguments], env=environment, timeout=900, check=False)
        if done.returncode != 0:
            raise PrometheusMissing(f"apt-get {arguments[0]} failed; {remedy}")


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    try:
        install()
    except PrometheusMissing as error:
        sys.exit(str(error))
