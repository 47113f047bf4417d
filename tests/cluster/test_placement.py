"""Replicas whose engines have two workers, in a cluster of machines of one and two CPUs, all on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loramux.admin.server.local_cluster import LocalCluster
from loramux.admin.server.settings import Settings, load_settings
from loramux.admin.serving.serve import read_model
from loramux.platform.cluster.ray_connection import QUIET
from tests.admin.serving.test_tensor_parallel_server import is_worker
from tests.cluster.test_cluster import DEMO, Stand, is_ours, until
from tests.conformance.served import LORAMUX, deployment

pytestmark = [pytest.mark.campaign, pytest.mark.cluster, pytest.mark.usefixtures("no_variables")]

NUM_STREAMS = 8
START = """
import sys
from pathlib import Path

from loramux.admin.server.local_cluster import LocalCluster

LocalCluster(Path(sys.argv[1])).start(num_gpus=0)
"""
"""Starts the head, which outlives the process that starts it."""

WAITS = "no machine of the cluster has 2 CPUs, which a replica reserves: Ray waits for one\n"


@dataclass(frozen=True, slots=True)
class Cluster:
    address: str
    environment: Mapping[str, str]
    nodes: list[int]

    @contextmanager
    def with_machine(self, num_cpus: int, num_gpus: int = 0) -> Iterator[None]:
        """A further machine, as Ray sees it."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.further_machine", self.address, str(num_cpus), str(num_gpus)],
            env=dict(self.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert "ready\n" in iter(process.stdout.readline, "")
            self.nodes.append(process.pid)
            yield
        finally:
            process.communicate(timeout=60)

    def workers(self) -> list[int]:
        """The processes of further workers on the added machines."""
        found = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]
        return [pid for pid in found if is_worker(pid) and any(is_ours(pid, node) for node in self.nodes)]

    def placements(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "tests.cluster.placements", self.address, *arguments]
        done = subprocess.run(command, env=dict(self.environment), capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


async def check_streams(stand: Stand, cluster: Cluster) -> None:
    """A worker that dies ends the engine, which its replica restarts."""
    await asyncio.to_thread(until, lambda: len(stand.serving()) == 1)
    [replica], [killed] = stand.serving(), cluster.workers()
    streams = await stand.stream_many(NUM_STREAMS, seed=1)
    assert all(one.is_complete for one in streams)
    streaming = asyncio.create_task(stand.stream_many(NUM_STREAMS, seed=2))
    await asyncio.sleep(0.3)
    os.kill(killed, signal.SIGKILL)
    streams += await streaming
    await asyncio.to_thread(until, lambda: len(cluster.workers()) == 1 and killed not in cluster.workers())
    # Ray does not replace the replica.
    await asyncio.to_thread(until, lambda: stand.serving() == [replica] and stand.health()[0] == 200)
    streams += (last := await stand.stream_many(NUM_STREAMS, seed=3))
    assert all(one.is_complete for one in last)
    # Without another replica, requests that had not started are refused.
    assert {one.status for one in streams} <= {200, 503}
    await asyncio.to_thread(stand.check_bills, [one for one in streams if one.status == 200])


def test_a_replica_reserves_all_of_its_workers_on_one_machine(
    demo_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data_dir = tmp_path_factory.mktemp("placement") / "data"
    data_dir.mkdir()
    local = LocalCluster(data_dir / "cluster")
    subprocess.run([sys.executable, "-c", START, str(data_dir / "cluster")], check=True)
    head = local.head()
    assert head is not None
    try:
        settings = ("--cluster", head.address, "--blob-url", f"file://{data_dir / 'blobs'}")
        sizes = {
            "LORAMUX_POOL_BYTES": "64MiB",
            "LORAMUX_MAX_SEQUENCES": "8",
            # The server also reads it. It has fewer threads than the engine has workers.
            "LORAMUX_TENSOR_PARALLEL_SIZE": "2",
        }
        made = deployment(demo_base, data_dir, settings, {**QUIET, **local.environment, **sizes})
        cluster = Cluster(head.address, made.environment, [])
        up = subprocess.Popen(
            [*LORAMUX, "cluster", "up", "--model", str(demo_base), "--data-dir", str(data_dir), *settings],
            env={**made.environment, "LORAMUX_NUM_THREADS": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert up.stdout is not None
        assert WAITS in iter(up.stdout.readline, "")
        # Two machines with a CPU each are not enough.
        with cluster.with_machine(1), cluster.with_machine(2, num_gpus=2):
            _, errors = up.communicate(timeout=120)
            assert up.returncode == 0, errors
            [group] = cluster.placements()
            assert group == {"strategy": "STRICT_PACK", "bundles": [{"CPU": 2.0}], "cpus": [2.0]}
            with made.running(log_file=data_dir / "server.log") as server:
                tenant = made.json("tenants", "create", "acme")
                key = made.json("keys", "create", "--tenant", "acme")["secret"]
                for name in ("pirate", "formal", "json"):
                    made.json("adapters", "push", str(DEMO / "adapters" / name), "--tenant", "acme", "--name", name)
                stand = Stand(made, server, key, tenant["id"])
                asyncio.run(check_streams(stand, cluster))
            config = msgspec.structs.replace(
                read_model(load_settings(Settings, {"model": demo_base, "data_dir": data_dir, "device": "cpu"}))[1],
                tensor_parallel_size=2,
                num_threads=2,
                pool_bytes=64 << 20,
            )
            [group] = cluster.placements(msgspec.json.encode(config).decode())
            assert (group["bundles"], group["cpus"]) == ([{"CPU": 2.0, "GPU": 2.0}], [2.0])
            [worker] = cluster.workers()
            assert b"CUDA_VISIBLE_DEVICES=0,1" in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    finally:
        local.stop()
