"""A batch over many adapters on a whole server, undisturbed and with a server that is killed again and again."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree, rmtree

import httpx
import openai
import pytest
import torch
from openai.types import Batch
from safetensors.torch import load_file, save_file

from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import push_adapter
from loramux.migrations.database import Database
from tests.conformance.served import Deployment, PlainHttp, deployment
from tests.platform.batches.batch_lab import CHAT, content_of, events_of, line

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(4 * 3600)]

NUM_LINES = int(os.environ.get("LORAMUX_SERVED_LINES", "10000"))
NUM_ADAPTERS = int(os.environ.get("LORAMUX_SERVED_ADAPTERS", "500"))
NUM_KILLS = int(os.environ.get("LORAMUX_SERVED_KILLS", "50"))
MAX_RESIDENT = 16
"""Maximum number of adapters in the engine, far fewer than the batch names."""
MAX_RUNNING = 64
"""Maximum number of lines that a server with the default `max_sequences` runs at once."""
PIRATE = Path(__file__).parents[2] / "admin" / "demo" / "adapters" / "pirate"
FINAL = ("completed", "failed", "expired", "cancelled")
LOADS = re.compile(r"^loramux_engine_adapter_loads_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Site:
    deployment: Deployment
    key: str
    charged: set[str] = field(default_factory=set)
    """The requests of the batches that were checked. Nothing else is charged."""

    def create(self) -> str:
        """Start a batch with the lines in random order, and return its identifier."""
        names = [f"{number}" for number in range(NUM_LINES)]
        random.Random(1).shuffle(names)
        lines = [line(name, model=f"acme/a{int(name) % NUM_ADAPTERS}") for name in names]
        with self.deployment.client(self.key) as client:
            file = client.files.create(file=("in.jsonl", content_of(lines)), purpose="batch")
            made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        return made.id

    def until(self, batch_id: str, num_answers: int) -> Batch:
        """Wait until `num_answers` lines have answers, or the batch ends."""
        with self.deployment.client(self.key) as client:
            while True:
                found = client.batches.retrieve(batch_id)
                counts = found.request_counts
                if found.status in FINAL or (counts is not None and counts.completed + counts.failed >= num_answers):
                    return found
                time.sleep(0.05)

    def loads(self) -> int:
        """The number of adapters that the engine has loaded since it started."""
        with PlainHttp() as http:
            answer = http.get(f"http://127.0.0.1:{self.deployment.admin_port}/metrics")
        return int(sum(float(value) for value in LOADS.findall(answer.text)))

    def check(self, batch_id: str) -> None:
        """Check that each line has one answer, and that the ledger charges exactly these answers."""
        with self.deployment.client(self.key) as client:
            found = client.batches.retrieve(batch_id)
            assert (found.status, found.error_file_id) == ("completed", None)
            content = client.files.content(found.output_file_id or "").text
        answers = [json.loads(one) for one in content.splitlines()]
        assert sorted(int(one["custom_id"]) for one in answers) == list(range(NUM_LINES))
        usages = {one["response"]["request_id"]: one["response"]["body"]["usage"] for one in answers}
        assert len(usages) == NUM_LINES
        database = Database(f"sqlite:///{self.deployment.data_dir / 'loramux.db'}")
        events = {event.request_id: event for event in events_of(database) if event.prompt_tokens}
        database.close()
        assert usages.keys() <= events.keys()
        for request_id, usage in usages.items():
            event = events[request_id]
            assert (event.prompt_tokens, event.completion_tokens) == (
                usage["prompt_tokens"],
                usage["completion_tokens"],
            )
        self.charged.update(usages)
        assert events.keys() == self.charged


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, demo_base: Path) -> Site:
    directory = tmp_path_factory.mktemp("batches")
    settings = {"LORAMUX_MAX_RESIDENT_ADAPTERS": f"{MAX_RESIDENT}"}
    made = deployment(demo_base, directory / "data", (), settings)
    tensors = load_file(PIRATE / "adapter_model.safetensors")
    with made.running():
        made.json("tenants", "create", "acme")
        key = made.json("keys", "create", "--tenant", "acme")["secret"]
        client = AdminClient(f"http://127.0.0.1:{made.admin_port}", made.admin_key, timeout_s=120.0)

        def push(number: int) -> None:
            copy = copytree(PIRATE, directory / f"a{number}")
            # Each adapter has weights of its own. The engine loads equal weights only once.
            noise = torch.Generator().manual_seed(number)
            varied = {
                name: value * (1 + 0.05 * torch.randn(value.shape, generator=noise)).to(value.dtype)
                for name, value in tensors.items()
            }
            save_file(varied, Path(copy) / "adapter_model.safetensors")
            push_adapter(client, Path(copy), "acme", f"a{number}")
            rmtree(copy)

        with client, ThreadPoolExecutor(4) as pool:
            list(pool.map(push, range(NUM_ADAPTERS)))
    return Site(made, key)


def test_undisturbed_batch_loads_each_adapter_once(site: Site) -> None:
    with site.deployment.running():
        batch_id = site.create()
        site.until(batch_id, NUM_LINES + 1)
        loads = site.loads()
        print(f"{NUM_LINES} lines over {NUM_ADAPTERS} adapters: {loads} loads")
        site.check(batch_id)
    assert NUM_ADAPTERS <= loads <= 1.1 * NUM_ADAPTERS


def test_killed_servers_lose_and_repeat_nothing(site: Site) -> None:
    loads = num_kills = 0
    batch_id = None
    for kill in range(NUM_KILLS):
        with site.deployment.running() as server:
            batch_id = batch_id or site.create()
            found = site.until(batch_id, (kill + 1) * NUM_LINES // (NUM_KILLS + 1))
            assert found.status not in FINAL
            with suppress(httpx.TransportError, openai.APIError):
                loads += site.loads()
            server.send_signal(signal.SIGKILL)
            server.wait()
            num_kills += 1
    assert batch_id is not None
    with site.deployment.running():
        site.until(batch_id, NUM_LINES + 1)
        loads += site.loads()
        print(f"{NUM_LINES} lines over {NUM_ADAPTERS} adapters, {num_kills} kills: {loads} loads")
        site.check(batch_id)
    # Of the adapters that a killed server had loaded, only those with lines left are loaded again.
    num_unfinished = MAX_RUNNING * NUM_ADAPTERS // NUM_LINES + 2
    assert loads <= 1.1 * NUM_ADAPTERS + num_kills * num_unfinished
