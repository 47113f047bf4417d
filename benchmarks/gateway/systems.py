"""Starts the systems: loramux's gateway, LiteLLM's proxy, and the scripted server that answers without a gateway."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.gateway.clients import Address, Script
from benchmarks.gateway.scripted_engine import EngineScript
from benchmarks.peers.child_server import (
    HOST,
    ChildServer,
    child_server,
    free_port,
    own_environment,
    processor_s,
    server_environment,
)
from loramux.engine.architectures.model_files import model_sha256
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants

LORAMUX, LITELLM, DIRECT = "loramux", "LiteLLM", "no gateway"
MODEL = Path(__file__).parents[2] / "admin" / "demo" / "base"
VARIABLE = "LORAMUX_PEER_LITELLM"
ADVICE = f"set {VARIABLE} to the Python of an environment with litellm[proxy] and httptools"
START_S = 120.0
MASTER_KEY = "sk-master-key-of-the-benchmark"


@dataclass(frozen=True, slots=True)
class Running:
    """A running system. `pid` is the process whose processor time counts as the system's."""

    name: str
    address: Address
    pid: int

    def processor_s(self) -> float:
        return processor_s(self.pid)


@contextlib.contextmanager
def open_direct(script: Script, logs: Path) -> Iterator[Running]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.gateway.scripted_server", str(port)]
    command.append(msgspec.json.encode(list(script.texts)).decode())
    with child_server(DIRECT, command, own_environment({}), logs / "scripted-server.log") as server:
        server.wait_until_ready(f"http://{HOST}:{port}/", START_S)
        yield Running(DIRECT, Address(port, "none"), server.pid)


@contextlib.contextmanager
def open_litellm(python: Path, back_end: Address, logs: Path) -> Iterator[Running]:
    """One worker with a master key and without a database, in front of the scripted server."""
    port = free_port()
    config = logs / "litellm.json"
    parameters = {"model": "openai/base", "api_base": f"http://{HOST}:{back_end.port}/v1", "api_key": "none"}
    document = {
        "model_list": [{"model_name": "base", "litellm_params": parameters}],
        "general_settings": {"master_key": MASTER_KEY},
    }
    # JSON is YAML.
    config.write_bytes(msgspec.json.encode(document))
    command = [str(python.parent / "litellm"), "--config", str(config), "--host", HOST, "--port", str(port)]
    environment = server_environment({"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"})
    with child_server(LITELLM, command, environment, logs / "litellm.log") as server:
        server.wait_until_ready(f"http://{HOST}:{port}/health/liveliness", START_S)
        yield Running(LITELLM, Address(port, MASTER_KEY), server.pid)


@contextlib.contextmanager
def open_loramux(script: Script, folder: Path, database: Database, database_url: str, logs: Path) -> Iterator[Running]:
    """`loramux gateway` as in production: a process in front of an engine's socket, with a ledger."""
    socket, port, admin_port = folder / "engine.sock", free_port(), free_port()
    key = ApiKeys(database).create(Tenants(database).create("bench").id, "bench").secret
    told = EngineScript(model_sha256=model_sha256(MODEL), token_ids=tuple(script.token_ids))
    engine_command = [sys.executable, "-m", "benchmarks.gateway.scripted_engine", str(socket)]
    engine_command.append(msgspec.json.encode(told).decode())
    command = [
        *(sys.executable, "-m", "loramux.admin.cli", "gateway", "--model", str(MODEL), "--engine", str(socket)),
        *("--database-url", database_url, "--data-dir", str(folder / "gateway"), "--served-name", "base"),
        *("--host", HOST, "--port", str(port), "--admin-port", str(admin_port)),
    ]
    with child_server("engine", engine_command, own_environment({}), logs / "scripted-engine.log") as engine:
        _wait_for(socket, engine)
        with child_server(LORAMUX, command, own_environment({}), logs / "loramux.log") as server:
            server.wait_until_ready(f"http://{HOST}:{port}/health/ready", START_S)
            yield Running(LORAMUX, Address(port, key), server.pid)


def find_litellm(variables: Mapping[str, str]) -> tuple[Path | None, str]:
    """The Python of LiteLLM's environment and LiteLLM's version, or None and advice on what to set."""
    if not variables.get(VARIABLE):
        return None, ADVICE
    python = Path(variables[VARIABLE]).absolute()
    asked = [str(python), "-c", "from importlib.metadata import version; print(version('litellm'))"]
    try:
        shown = subprocess.run(asked, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None, f"{VARIABLE} is {python}, which cannot import litellm: {ADVICE}"
    return python, shown.stdout.strip()


def _wait_for(socket: Path, engine: ChildServer) -> None:
    deadline = time.monotonic() + START_S
    while not socket.exists():
        engine.check()
        if time.monotonic() > deadline:
            raise engine.failed("did not start listening")
        time.sleep(0.02)
