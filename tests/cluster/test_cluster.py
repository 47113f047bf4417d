"""A local Ray cluster with replicas of the demo base: answers, bills, kills, drains, sizes, and what listens.

LORAMUX_CLUSTER_KILLS=3 is the number of replicas that are killed under 32 streams. LORAMUX_CLUSTER_FIGURES=FILE writes
what was counted and measured to this file, after each kill and each later test.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import select

from benchmarks.machine import describe
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.local_cluster import LocalCluster
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.cluster.ray_connection import APP
from tests.conformance.fleet_streams import Stream, is_billed_as_received, numbered_stream, send_stream
from tests.conformance.gateway_lab import LabGateway
from tests.conformance.served import LORAMUX, Deployment, deployment

pytestmark = [pytest.mark.campaign, pytest.mark.cluster, pytest.mark.anyio]

DEMO = Path(__file__).parents[2] / "admin" / "demo"
NUM_KILLS = int(os.environ.get("LORAMUX_CLUSTER_KILLS", "3"))
FIGURES = os.environ.get("LORAMUX_CLUSTER_FIGURES")
NUM_STREAMS = 32
PATIENCE_S = 120.0
MAX_SEQUENCES = "8"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True, slots=True)
class Stand:
    deployment: Deployment
    server: subprocess.Popen[str]
    key: str
    tenant_id: str

    @property
    def gateway(self) -> LabGateway:
        return LabGateway({"port": self.deployment.port})

    def cluster(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_cluster(self.deployment, *arguments, **environment)

    def serving(self) -> list[str]:
        replicas = self.deployment.json("replicas")["data"]
        return [one["id"] for one in replicas if one["state"] == "serving"]

    def events(self) -> dict[str, Any]:
        events = schema.usage_events
        database = Database(f"sqlite:///{self.deployment.data_dir / 'loramux.db'}")
        with database.read() as connection:
            rows = connection.execute(select(events).filter_by(tenant_id=self.tenant_id)).all()
        database.close()
        return {row.request_id: row for row in rows}

    def metric(self, sample: str) -> float:
        shown = httpx.get(f"http://127.0.0.1:{self.deployment.admin_port}/metrics", trust_env=False, verify=False).text
        found = re.search(rf"^{re.escape(sample)} (\S+)$", shown, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def health(self) -> tuple[int, str]:
        answer = httpx.get(f"http://127.0.0.1:{self.deployment.admin_port}/health/ready", trust_env=False, verify=False)
        return answer.status_code, answer.json().get("reason", "")

    def num_prompt_tokens(self, replica_id: str) -> int:
        """Return the number of prompt tokens that a replica's engine has computed."""
        answer = httpx.get(
            f"http://127.0.0.1:{self.deployment.admin_port}/admin/v1/engine",
            params={"replica": replica_id},
            headers={"Authorization": f"Bearer {self.deployment.admin_key}"},
            trust_env=False,
            verify=False,
        )
        return int(answer.json()["prompt_tokens"])

    def has_prompts(self, replica_ids: Iterable[str]) -> bool:
        return any(self.num_prompt_tokens(one) > 0 for one in replica_ids)

    async def time_of_a_prompt(self, replica_ids: Callable[[], Iterable[str]], seed: int) -> float | None:
        """Send requests shortly after one another, and return when one of these replicas first had a prompt, or None if
        they got none. They come four at a time, because an idle replica that holds their adapters would keep single
        ones.
        """
        taken_s, streaming = None, list[asyncio.Task[list[Stream]]]()
        while taken_s is None and len(streaming) < 2 * int(MAX_SEQUENCES):
            streaming.append(asyncio.create_task(self.stream_many(4, seed + len(streaming))))
            await asyncio.sleep(0.1)
            if await asyncio.to_thread(lambda: self.has_prompts(replica_ids())):
                taken_s = time.monotonic()
        self.check_bills([one for streams in await asyncio.gather(*streaming) for one in streams])
        return taken_s

    async def stream_many(self, number: int, seed: int) -> list[Stream]:
        dice = random.Random(seed)
        models = ["demo-base", "acme/pirate", "acme/formal", "acme/json"]
        requests = [numbered_stream(dice, dice.choice(models)) for _ in range(number)]
        return await asyncio.gather(*(send_stream(self.gateway, self.key, one) for one in requests))

    def check_bills(self, streams: list[Stream]) -> None:
        """Every stream has ended, completely or by an error, and its bill is what its client received."""
        for one in streams:
            assert one.status == 200, one.answer
        until(lambda: {one.request_id for one in streams} <= self.events().keys())
        events = self.events()
        for one in streams:
            assert one.is_complete or one.is_ended_by_error, one.answer[-300:]
            assert is_billed_as_received(one, events), (one.num_received, events[one.request_id or ""])


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def run_cluster(made: Deployment, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LORAMUX, "cluster", *arguments, "--data-dir", str(made.data_dir)],
        env={**made.environment, "LORAMUX_MAX_SEQUENCES": MAX_SEQUENCES, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def replica_pids() -> list[int]:
    return pids_of("^ray::ServeReplica:loramux:engine")


def spare_pids() -> list[int]:
    """The processes that Ray keeps in reserve."""
    return pids_of("^ray::IDLE")


def pids_of(name: str) -> list[int]:
    """The processes of this test's cluster to which Ray has given this name."""
    found = subprocess.run(["pgrep", "-f", name], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split() if is_ours(int(pid))]


def is_ours(pid: int, ancestor: int | None = None) -> bool:
    """Return whether the process descends from `ancestor`, by default the head of the latest cluster."""
    ancestor = ancestor or heads[-1]
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


heads: list[int] = []
MOVED = 'loramux_forwarded_sequences_total{outcome="moved"}'


def note(**figures: Any) -> None:
    """Add figures to the file that LORAMUX_CLUSTER_FIGURES names, if it is set."""
    if FIGURES is None:
        return
    file = Path(FIGURES)
    document: dict[str, Any] = {"machine": describe(), "date": datetime.now(UTC).date().isoformat()}
    with suppress(FileNotFoundError):
        document = json.loads(file.read_text())
    file.write_text(json.dumps(document | figures, indent=1) + "\n")


def up(made: Deployment, replicas: int, *arguments: str, **environment: str) -> None:
    done = run_cluster(made, "up", "--model", str(made.model), "--replicas", str(replicas), *arguments, **environment)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    data_dir = tmp_path_factory.mktemp("cluster") / "data"
    made = deployment(DEMO / "base", data_dir, ("--cluster", "local"), {"LORAMUX_POOL_BYTES": "64MiB"})
    try:
        up(made, 2)
        heads.append(msgspec.json.decode((data_dir / "cluster" / "head.json").read_bytes())["pid"])
        with made.running(log_file=data_dir / "server.log") as server:
            tenant = made.json("tenants", "create", "acme")
            key = made.json("keys", "create", "--tenant", "acme")["secret"]
            for name in ("pirate", "formal", "json"):
                made.json("adapters", "push", str(DEMO / "adapters" / name), "--tenant", "acme", "--name", name)
            yield Stand(made, server, key, tenant["id"])
        log = (data_dir / "server.log").read_text()
        # Ray asks a replica that has been killed, and does not look at the answer.
        log = re.sub(r"Task exception was never retrieved\nfuture: .*/ray/serve/_private/.*\nTraceback .*\n", "", log)
        assert "Traceback" not in log, log
    finally:
        assert run_cluster(made, "down").returncode == 0
    assert "no cluster was running" in run_cluster(made, "down").stdout


def test_two_replicas_serve(stand: Stand) -> None:
    until(lambda: len(stand.serving()) == 2)
    done = stand.cluster("status", "--json")
    assert done.returncode == 0
    assert '"state": "RUNNING"' in done.stdout
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in replica_pids()} == {os.getpriority(os.PRIO_PROCESS, 0)}
    client = stand.deployment.client(stand.key)
    question: list[Any] = [{"role": "user", "content": "How do I return a parcel?"}]
    answers = {}
    for model in ("demo-base", "acme/pirate", "acme/formal", "acme/json"):
        whole = client.chat.completions.create(model=model, messages=question, max_tokens=40, temperature=0)
        chunks = client.chat.completions.create(
            model=model, messages=question, max_tokens=40, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        answers[model] = whole.choices[0].message.content
        assert text == answers[model]
    assert len(set(answers.values())) == 4
    assert stand.deployment.json("residency")["object"]


def test_nothing_listens_beyond_loopback(stand: Stand) -> None:
    shown = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    listening = [line.split() for line in shown.splitlines()]
    ours = [fields for fields in listening if any(is_ours(int(pid)) for pid in re.findall(r"pid=(\d+)", fields[-1]))]
    assert len(ours) >= 5
    for fields in ours:
        assert fields[3].startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:", "[::1]:")), fields


async def test_answers_are_billed_as_received(stand: Stand) -> None:
    stand.check_bills(await stand.stream_many(NUM_STREAMS, seed=1))


async def test_killed_replicas_cost_only_started_streams(stand: Stand) -> None:
    num_lost, replaced_s, traffic_s = 0, list[float](), list[float]()
    num_killed_in_vain, num_from_reserve = 0, 0
    for number in range(NUM_KILLS):
        await asyncio.to_thread(until, lambda: len(stand.serving()) == 2 and bool(spare_pids()))
        spare, known = spare_pids(), replica_pids()
        streaming = asyncio.create_task(stand.stream_many(NUM_STREAMS, seed=100 + number))
        await asyncio.sleep(random.Random(number).uniform(0.3, 1.5))
        before = set(stand.serving())
        num_killed_in_vain += streaming.done()
        os.kill(random.Random(number).choice(replica_pids()), signal.SIGKILL)
        killed_s = time.monotonic()
        streams = await streaming
        await asyncio.to_thread(stand.check_bills, streams)
        # Only a stream that has started is ended: all others complete under the identifier in their head.
        assert all(one.num_received > 0 for one in streams if one.is_ended_by_error)
        num_lost += sum(one.is_ended_by_error for one in streams)
        await asyncio.to_thread(until, lambda known=before: bool(set(stand.serving()) - known))
        replaced_s.append(round(time.monotonic() - killed_s, 1))
        deadline_s = time.monotonic() + PATIENCE_S
        taken_s = None
        while taken_s is None:
            assert time.monotonic() < deadline_s
            # On a busy machine, another replica can be replaced, too.
            seed = 10_000 + 100 * number
            taken_s = await stand.time_of_a_prompt(lambda known=before: set(stand.serving()) - known, seed)
        traffic_s.append(round(taken_s - killed_s, 1))
        num_from_reserve += bool(set(replica_pids()) & set(spare) - set(known))
        note(
            kills={
                "kills": number + 1,
                "streams": (number + 1) * NUM_STREAMS,
                "after_the_streams": num_killed_in_vain,
                "ended_by_an_error": num_lost,
                "moved": round(stand.metric(MOVED)),
                "replaced_from_reserve": num_from_reserve,
                "replaced_s": replaced_s,
                "traffic_s": traffic_s,
            }
        )
    print(
        f"{NUM_KILLS} kills under {NUM_STREAMS} streams: {num_lost} streams ended by an error, "
        f"{stand.metric(MOVED):.0f} moved, replacements took requests after {min(traffic_s)} to {max(traffic_s)} s, "
        f"in the median {statistics.median(traffic_s):.1f} s"
    )
    assert num_from_reserve == NUM_KILLS
    assert num_killed_in_vain < NUM_KILLS


async def test_a_rolling_change_loses_no_request(stand: Stand) -> None:
    before = set(stand.serving())
    rolling = asyncio.create_task(asyncio.to_thread(up, stand.deployment, 2, LORAMUX_MAX_BATCH_TOKENS="256"))
    streams: list[Stream] = []
    while not rolling.done():
        streams += await stand.stream_many(8, seed=1000 + len(streams))
    await rolling
    await asyncio.to_thread(until, lambda: len(stand.serving()) == 2)
    streams += await stand.stream_many(8, seed=999)
    assert not before & set(stand.serving())
    await asyncio.to_thread(stand.check_bills, streams)
    assert all(one.is_complete for one in streams)
    note(rolling_change={"streams": len(streams), "lost": 0})
    print(f"a rolling change under load: {len(streams)} streams, none lost")


async def test_a_new_replica_takes_requests(stand: Stand) -> None:
    # This changes nothing after the test above.
    await asyncio.to_thread(up, stand.deployment, 2, LORAMUX_MAX_BATCH_TOKENS="256")
    await asyncio.to_thread(until, lambda: len(stand.serving()) == 2)
    before = set(stand.serving())
    await asyncio.to_thread(up, stand.deployment, 3, LORAMUX_MAX_BATCH_TOKENS="256")
    await asyncio.to_thread(until, lambda: len(stand.serving()) == 3)
    # The others stay, because their settings are the same.
    (new,) = set(stand.serving()) - before
    stand.check_bills(await stand.stream_many(2 * NUM_STREAMS, seed=7))

    assert await asyncio.to_thread(stand.num_prompt_tokens, new) > 0


async def test_more_work_than_room_is_refused_with_a_time_to_wait(stand: Stand) -> None:
    # Each engine may have 600 tokens waiting.
    await asyncio.to_thread(up, stand.deployment, 2, LORAMUX_MAX_BATCH_TOKENS="256", LORAMUX_MAX_WAITING_TOKENS="600")
    await asyncio.to_thread(until, lambda: len(stand.serving()) == 2)
    streams = await stand.stream_many(3 * NUM_STREAMS, seed=3)
    refused = [one for one in streams if one.status != 200]
    assert refused
    for one in refused:
        assert one.status == 503
        assert b'"code":"overloaded"' in one.answer
        assert re.search(rb"(?i)retry-after: [1-9]", one.answer)
    stand.check_bills([one for one in streams if one.status == 200])
    note(back_pressure={"streams": len(streams), "refused": len(refused)})
    print(f"back-pressure: {len(refused)} of {len(streams)} requests refused with 503 and Retry-After")


async def test_the_number_of_replicas_follows_the_work(stand: Stand) -> None:
    delay = {"LORAMUX_CLUSTER_DOWNSCALE_DELAY_S": "5", "LORAMUX_MAX_BATCH_TOKENS": "256"}
    await asyncio.to_thread(partial(up, stand.deployment, 1, "--max-replicas", "2", **delay))
    await asyncio.to_thread(until, lambda: len(stand.serving()) == 1)
    streams: list[Stream] = []

    async def stream_until(is_so: Callable[[], bool], number: int) -> float:
        """Keep `number` streams running until `is_so`. Return the seconds that it took."""
        started_s = time.monotonic()
        waiting = asyncio.create_task(asyncio.to_thread(until, is_so))

        async def client(seed: int) -> None:
            while not waiting.done():
                streams.extend(await stand.stream_many(1, seed=seed + len(streams)))

        await asyncio.gather(waiting, *(client(10_000 * place) for place in range(number)))
        return round(time.monotonic() - started_s, 1)

    grown_s = await stream_until(lambda: len(stand.serving()) == 2, 2 * int(MAX_SEQUENCES))
    shrunk_s = await stream_until(lambda: len(stand.serving()) == 1, 1)
    await asyncio.to_thread(stand.check_bills, streams)
    assert all(one.is_complete for one in streams)
    note(autoscaling={"streams": len(streams), "lost": 0, "grown_s": grown_s, "shrunk_s": shrunk_s})
    print(
        f"autoscaling: {len(streams)} streams, none lost; a second replica after {grown_s} s of load, and one again "
        f"{shrunk_s} s after it"
    )


async def test_a_server_survives_the_loss_of_the_head(stand: Stand) -> None:
    streaming = asyncio.create_task(stand.stream_many(8, seed=5))
    await asyncio.sleep(0.3)
    os.killpg(heads[-1], signal.SIGKILL)
    streams = await streaming
    await asyncio.to_thread(stand.check_bills, [one for one in streams if one.status == 200])
    # Replicas that have lost the head may run for some seconds more.
    await asyncio.to_thread(until, lambda: stand.health()[0] == 503)
    assert stand.server.poll() is None
    refused = (await stand.stream_many(1, seed=6))[0]
    assert refused.status == 503
    assert b'"code":"engine_unavailable"' in refused.answer
    status, reason = await asyncio.to_thread(stand.health)
    assert status == 503
    assert "cluster" in reason
    await asyncio.to_thread(up, stand.deployment, 2)
    heads.append(msgspec.json.decode((stand.deployment.data_dir / "cluster" / "head.json").read_bytes())["pid"])
    await asyncio.to_thread(until, lambda: len(stand.serving()) == 2)
    await asyncio.to_thread(until, lambda: stand.health()[0] == 200)
    stand.check_bills(await stand.stream_many(8, seed=8))


async def test_ray_builds_the_engines_from_its_own_configuration(stand: Stand) -> None:
    before = set(stand.serving())
    made = stand.deployment
    local = LocalCluster(DataDirectory(made.data_dir).cluster)
    head = local.head()
    assert head is not None
    settings = {
        "model": str(made.model),
        "data_dir": str(made.data_dir),
        "blob_url": f"file://{made.data_dir / 'blobs'}",
        "device": "cpu",
        "num_threads": 1,
        "max_sequences": int(MAX_SEQUENCES),
        "cluster_replicas": 1,
    }
    # As the chart writes it for KubeRay.
    application = {
        "name": APP,
        "route_prefix": None,
        "import_path": "loramux.admin.serving.cluster_application:engines",
        "args": settings,
    }
    document = json.dumps({"proxy_location": "Disabled", "applications": [application]})
    command = [sys.executable, "-m", "tests.cluster.configured", head.address, document]
    await asyncio.to_thread(subprocess.run, command, env={**made.environment, **local.environment}, check=True)
    await asyncio.to_thread(until, lambda: len(stand.serving()) == 1 and not before & set(stand.serving()))
    # Meanwhile, no replica may have served.
    await asyncio.to_thread(until, lambda: stand.health()[0] == 200)
    streams = await stand.stream_many(8, seed=9)
    await asyncio.to_thread(stand.check_bills, streams)
    assert all(one.is_complete for one in streams)
