"""Starts what is compared: servers with stamping engines, alone, sharing requests, or in front of a Ray cluster."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.cluster.deployer import HAPROXY, MULTIPLEXED, PROXIED, SESSIONS, Deployment
from benchmarks.cluster.server import Server
from benchmarks.gateway.clients import Address, Script
from benchmarks.peers.child_server import HOST, ChildServer, child_server, free_port, own_environment
from benchmarks.peers.system import SystemFailed
from benchmarks.sharing.stamping_engine import StampScript
from loramux.adapter_store.registry.bases import Bases
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.local_cluster import LocalCluster
from loramux.engine.architectures.model_files import base_sha256, model_sha256
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.ready_adapters import add_ready_adapter, digest_of

MODEL = Path(__file__).parents[2] / "admin" / "demo" / "base"
START_S = 180.0
BASE_NAME = "base"
MAX_SEQUENCES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What all systems share: a database with a tenant and its adapters, and a folder for files."""

    folder: Path
    database_url: str
    api_key: str
    models: tuple[str, ...]
    """The model names of the adapters."""
    script: StampScript
    proxy: str
    """`haproxy`, or `default` for the proxy that Ray Serve has without further settings."""

    def command(self, script: StampScript) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", "benchmarks.sharing.stamping_engine"),
            msgspec.json.encode(script).decode(),
        )

    def settings(self, name: str) -> dict[str, Any]:
        """The settings of a server whose data is in the folder `name`."""
        return {
            "model": str(MODEL),
            "data_dir": str(self.folder / name),
            "database_url": self.database_url,
            "blob_url": f"file://{self.folder / 'blobs'}",
            "served_name": BASE_NAME,
            "device": "cpu",
            "dtype": "float32",
            "host": HOST,
            "port": free_port(),
            "admin_port": free_port(),
            "max_sequences": MAX_SEQUENCES,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Running servers. `urls` are where requests go, in turn."""

    urls: Sequence[str]
    admin_urls: Sequence[str]
    api_key: str

    @property
    def address(self) -> Address:
        return Address(int(self.urls[0].rpartition(":")[2]), self.api_key)

    def forwarded(self) -> float:
        """The number of sequences that servers have run on other engines than their own."""
        return sum(_metric(url, 'loramux_forwarded_sequences_total{outcome="completed"}') for url in self.admin_urls)


def make_world(folder: Path, database: Database, database_url: str, num_adapters: int, proxy: str) -> World:
    tenant = Tenants(database).create("bench")
    base_id = base_sha256(MODEL)
    Bases(database).register(base_id, BASE_NAME)
    names = [f"adapter-{number}" for number in range(num_adapters)]
    for name in names:
        add_ready_adapter(database, tenant.id, name, [digest_of(name)], base_id=base_id)
    words = Script.of(ModelTokenizer.load(MODEL))
    script = StampScript(token_ids=tuple(words.token_ids), model_sha256=model_sha256(MODEL), base_sha256=base_id)
    (folder / "blobs").mkdir()
    key = ApiKeys(database).create(tenant.id, "bench").secret
    models = tuple(f"bench/{name}" for name in names)
    return World(folder=folder, database_url=database_url, api_key=key, models=models, script=script, proxy=proxy)


@contextlib.contextmanager
def server_of_cluster(
    world: World, name: str, script: StampScript, num_replicas: int, kind: str = SESSIONS
) -> Iterator[System]:
    """A server in front of a Ray cluster. `kind` is SESSIONS, PLAIN or MULTIPLEXED."""
    with _cluster(world, name, script, num_replicas, kind) as (address, environment):
        settings = {**world.settings(f"{name}-server"), "cluster": address}
        told = Server(settings=settings, is_by_handle=kind != SESSIONS, is_multiplexed=kind == MULTIPLEXED)
        with _server(world, name, told, environment) as server:
            _wait_until_ready(server, settings)
            # A server is ready as soon as one replica is.
            if kind == SESSIONS:
                _wait_for_peers([settings], num_replicas)
            yield _system(world, [settings])


@contextlib.contextmanager
def gateway_behind_proxy(world: World, name: str, script: StampScript) -> Iterator[System]:
    """A gateway that Ray Serve runs and calls through its proxy."""
    gateway = world.settings(f"{name}-gateway")
    port = free_port()
    with _cluster(world, name, script, 1, PROXIED, gateway, port):
        url = f"http://{HOST}:{port}"
        _wait_for(f"{url}/health/ready")
        yield System(urls=(url,), admin_urls=(), api_key=world.api_key)


@contextlib.contextmanager
def servers(world: World, name: str, scripts: Sequence[StampScript], is_sharing: bool) -> Iterator[System]:
    """Servers with an engine each. If `is_sharing`, they forward requests to each other."""
    settings = [world.settings(f"{name}-{number}") for number in range(len(scripts))]
    with contextlib.ExitStack() as stack:
        running = []
        for number, (one, script) in enumerate(zip(settings, scripts, strict=True)):
            if is_sharing:
                one["peer_address"] = f"{HOST}:{free_port()}"
            told = Server(settings=one, command=world.command(script))
            running.append(stack.enter_context(_server(world, f"{name}-{number}", told)))
        for server, one in zip(running, settings, strict=True):
            _wait_until_ready(server, one)
        if is_sharing:
            _wait_for_peers(settings, len(scripts) - 1)
        yield _system(world, settings)


def _system(world: World, settings: Sequence[Mapping[str, Any]]) -> System:
    return System(
        urls=[f"http://{HOST}:{one['port']}" for one in settings],
        admin_urls=[f"http://{HOST}:{one['admin_port']}" for one in settings],
        api_key=world.api_key,
    )


@contextlib.contextmanager
def _server(
    world: World, name: str, told: Server, environment: Mapping[str, str] | None = None
) -> Iterator[ChildServer]:
    command = [sys.executable, "-m", "benchmarks.cluster.server", msgspec.json.encode(told).decode()]
    log = world.folder / "logs" / f"{name}.log"
    with child_server(name, command, own_environment(environment or {}), log) as server:
        yield server


@contextlib.contextmanager
def _cluster(
    world: World,
    name: str,
    script: StampScript,
    num_replicas: int,
    kind: str,
    gateway: dict[str, Any] | None = None,
    port: int = 0,
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Run a cluster. Yields its address, and what a process needs in its environment to join it."""
    settings = {key: value for key, value in world.settings(name).items() if not key.endswith("port")}
    deployment = Deployment(
        kind=kind,
        settings=settings,
        gateway=gateway or {},
        command=world.command(script),
        num_replicas=num_replicas,
        num_slots=script.num_slots,
        port=port,
    )
    local = LocalCluster(DataDirectory(Path(settings["data_dir"])).cluster)
    fast = HAPROXY if kind == PROXIED and world.proxy == "haproxy" else {}
    command = [sys.executable, "-m", "benchmarks.cluster.deployer", msgspec.json.encode(deployment).decode()]
    log = world.folder / "logs" / f"{name}-deployer.log"
    log.parent.mkdir(exist_ok=True)
    try:
        with log.open("wb") as output:
            code = subprocess.run(
                command, env=own_environment(fast), stdout=output, stderr=output, timeout=START_S, check=False
            ).returncode
        head = local.head()
        if code or head is None:
            raise SystemFailed(f"the cluster {name} did not start:\n{log.read_text()[-2000:]}")
        yield head.address, local.environment
    finally:
        local.stop()


def _wait_until_ready(server: ChildServer, settings: Mapping[str, Any]) -> None:
    server.wait_until_ready(f"http://{HOST}:{settings['port']}/health/ready", START_S)


def _wait_for_peers(settings: Sequence[Mapping[str, Any]], num_peers: int) -> None:
    for one in settings:
        _wait(
            lambda url=f"http://{HOST}:{one['admin_port']}": (  # type: ignore[misc]
                _metric(url, 'loramux_peers{state="connected"}') == num_peers
            ),
            f"{num_peers} connected engines",
        )


def _wait_for(url: str) -> None:
    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
        return False

    _wait(answers, url)


def _wait(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + START_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise SystemFailed(f"no sign of {what} within {START_S:.0f} s")
        time.sleep(0.2)


def _metric(admin_url: str, sample: str) -> float:
    lines = httpx.get(f"{admin_url}/metrics", timeout=30.0, trust_env=False).text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample)), 0.0)
