"""Several servers on loopback that share a PostgreSQL database and an S3-compatible store with the same adapters."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import boto3
import httpx

from benchmarks.accounts.databases import open_database_at
from benchmarks.peers.child_server import HOST, NO_DRAFTS, ChildServer, child_server, free_port, server_environment
from benchmarks.peers.loramux_server import BASE_NAME, loramux_environment, push_adapters

BUCKET = "adapters"
START_S = 300.0
LOADS = "loramux_engine_adapter_loads_total"
STAGE_SECONDS = "loramux_adapter_stage_seconds_total"
COUNTERS = (LOADS, STAGE_SECONDS)

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(16),
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSetting:
    """`num_resident` limits the number of adapters in each server's pool, and `disk_tier_bytes` limits each disk
    tier."""

    base: Path
    num_servers: int
    num_resident: int
    disk_tier_bytes: int
    threads: int
    logs: Path


@dataclass(frozen=True, slots=True)
class Server:
    process: ChildServer
    url: str
    admin_url: str

    def wait_until_ready(self) -> None:
        self.process.wait_until_ready(f"{self.admin_url}/health/ready", START_S)

    def counters(self, admin_key: str) -> dict[str, float]:
        """The number of adapters that this server's engine has loaded, and the seconds of each stage of loading."""
        headers = {"authorization": f"Bearer {admin_key}"}
        text = httpx.get(f"{self.admin_url}/metrics", headers=headers, timeout=30.0, trust_env=False).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(COUNTERS)]
        return {name: float(value) for name, value in lines}


@dataclass(frozen=True, slots=True)
class Store:
    """The database and the bucket that all servers share, with the keys of an operator and of a tenant."""

    database_url: str
    environment: dict[str, str]
    admin_key: str
    api_key: str
    models: tuple[str, ...]
    """The model names of the adapters."""


@contextlib.contextmanager
def open_store(setting: ClusterSetting, adapters: Sequence[Path], folder: Path) -> Iterator[Store]:
    """Start the database and the object store, and push the adapters through a server that is then stopped."""
    with _open_bucket(setting.logs) as bucket, open_database_at("postgresql") as (_, database_url):
        admin_key = secrets.token_urlsafe(32)
        environment = {
            **loramux_environment(admin_key, setting.threads, "1GiB"),
            "LORAMUX_MAX_RESIDENT_ADAPTERS": str(setting.num_resident),
            "LORAMUX_DISK_TIER_BYTES": str(setting.disk_tier_bytes),
            "LORAMUX_HOST_TIER_BYTES": "0",
            **bucket,
        }
        store = Store(database_url, environment, admin_key, "", ())
        with open_server(setting, store, folder / "upload", "upload") as server:
            server.wait_until_ready()
            api_key, models = push_adapters(server.admin_url, admin_key, {path.name: path for path in adapters})
        yield Store(database_url, environment, admin_key, api_key, tuple(models.values()))


@contextlib.contextmanager
def open_servers(setting: ClusterSetting, store: Store, folder: Path, is_routed: bool) -> Iterator[tuple[Server, ...]]:
    """Start the servers. If `is_routed`, they forward each request to a server that holds its adapter."""
    with contextlib.ExitStack() as stack:
        servers = tuple(
            stack.enter_context(open_server(setting, store, folder / str(number), f"server-{number}", is_routed))
            for number in range(setting.num_servers)
        )
        for server in servers:
            server.wait_until_ready()
        yield servers


@contextlib.contextmanager
def open_server(
    setting: ClusterSetting, store: Store, data_dir: Path, name: str, is_routed: bool = False
) -> Iterator[Server]:
    """Start a server without waiting until it is ready."""
    port, admin_port = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "loramux.admin.cli", "serve", "--model", str(setting.base)),
        *("--data-dir", str(data_dir), "--database-url", store.database_url, "--blob-url", f"s3://{BUCKET}/bench"),
        *("--host", HOST, "--port", str(port), "--admin-port", str(admin_port), "--served-name", BASE_NAME),
        *("--device", "cpu", *NO_DRAFTS),
        *(("--peer-address", f"{HOST}:{free_port()}") if is_routed else ()),
    ]
    with child_server(name, command, store.environment, setting.logs / f"{name}.log") as process:
        yield Server(process, f"http://{HOST}:{port}", f"http://{HOST}:{admin_port}")


@contextlib.contextmanager
def _open_bucket(logs: Path) -> Iterator[dict[str, str]]:
    """Start an S3-compatible server with an empty bucket, and yield the environment variables for its clients."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    command = (sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port))
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": url}
    with child_server("moto", command, server_environment(environment), logs / "moto.log") as process:
        process.wait_until_ready(f"{url}/moto-api/", START_S)
        boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
        ).create_bucket(Bucket=BUCKET)
        yield environment
