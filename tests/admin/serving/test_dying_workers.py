"""A worker that dies at any point ends its engine's streams by an error. The engine restarts, and bills are exact."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from loramux.migrations.database import Database
from loramux.platform.ledger.events import Ledger
from tests.admin.serving import dying_worker
from tests.admin.serving.dying_worker import SERVING, SITE, STARTING
from tests.admin.serving.test_local_engines import Server
from tests.admin.serving.test_tensor_parallel_server import is_ready, is_restarted, num_running, worker_pid
from tests.conformance.demo_adapters import DEMO
from tests.conformance.gateway_lab import until

pytestmark = pytest.mark.campaign

NUM_STREAMS = 4
PROMPT = [5 + index for index in range(40)]


@dataclass(frozen=True, slots=True)
class Served:
    server: Server
    key: str
    point: Path
    data: Path

    @property
    def adapter(self) -> str:
        return "acme/pirate@1"

    def stream(self, number: int, model: str = "base") -> httpx.Response:
        body = {
            "model": model,
            "prompt": [*PROMPT, 5 + number],
            "max_tokens": 150,
            "ignore_eos": True,
            "stream": True,
            # Otherwise, a token that ends inside a character is sent only with the next one.
            "logprobs": 1,
            "return_token_ids": True,
        }
        with httpx.Client(trust_env=False, timeout=120) as http:
            headers = {"authorization": f"Bearer {self.key}"}
            return http.post(f"{self.server.url}/v1/completions", json=body, headers=headers)


@contextmanager
def served(demo_base: Path, directory: Path) -> Iterator[Served]:
    """A server whose workers die at the point in a file, with a tenant that has an adapter."""
    site, data, point = directory / "site", directory / "data", directory / "point"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    arguments = ("serve", "--model", demo_base, "--data-dir", data, "--port", 0, "--admin-port", 0)
    variables = {
        "LORAMUX_NUM_THREADS": "2",
        "LORAMUX_POOL_BYTES": "64MiB",
        "LORAMUX_MAX_SEQUENCES": "8",
        "PYTHONPATH": os.pathsep.join(map(str, (site, Path.cwd(), Path.cwd() / ".src"))),
        dying_worker.VARIABLE: str(point),
    }
    with Server((*arguments, "--tensor-parallel-size", 2), variables) as server:
        rest = f"{server.admin_url}/admin/v1"
        server.admin.post(f"{rest}/tenants", json={"slug": "acme"})
        key = server.admin.post(f"{rest}/api_keys", json={"tenant": "acme"}).json()["secret"]
        adapter = server.admin.post(f"{rest}/adapters", json={"tenant": "acme", "name": "pirate"}).json()["id"]
        files = {path.name: path.read_bytes() for path in (DEMO / "adapters" / "pirate").iterdir() if path.is_file()}
        pushed = server.admin.put(f"{rest}/adapters/{adapter}/push", files=files)
        assert pushed.status_code in (200, 201), pushed.text
        yield Served(server, key, point, data)


def is_complete(answer: httpx.Response) -> bool:
    return answer.text.rstrip().endswith("data: [DONE]") and "engine_unavailable" not in answer.text


def check_bills(data: Path, answers: list[httpx.Response]) -> None:
    """Each stream is complete or ends by an error, and is billed for the tokens that it received."""
    database = Database(f"sqlite:///{data / 'loramux.db'}")
    bills = {event.request_id: event for event in Ledger(database).events(None, limit=100).data}
    database.close()
    for answer in answers:
        assert is_complete(answer) or "engine_unavailable" in answer.text, answer.text
        received = sum(len(ids.split(",")) for ids in re.findall(r'"token_ids":\[([0-9,]+)\]', answer.text))
        bill = bills.get(answer.headers["x-request-id"])
        billed = (0, 0) if bill is None else (bill.prompt_tokens, bill.completion_tokens)
        # The prompt is billed with the first token.
        assert billed == ((len(PROMPT) + 1) * bool(received), received)


@pytest.mark.parametrize("point", [*STARTING, *SERVING, "idle"])
def test_streams_end_and_the_engine_is_restarted(point: str, demo_base: Path, tmp_path: Path) -> None:
    with served(demo_base, tmp_path) as lab, ThreadPoolExecutor(NUM_STREAMS) as pool:
        server = lab.server
        until(lambda: is_ready(server))
        [engine] = server.engine_pids()
        # The first request loads the adapter.
        model = lab.adapter if "adapter" in point else "base"
        is_decoding = point.startswith("in a decode")
        if point in SERVING and not is_decoding:
            lab.point.write_text(point)
        streams = []
        if point in SERVING:
            streams = [pool.submit(lab.stream, number, model) for number in range(NUM_STREAMS)]
        if is_decoding:
            until(lambda: num_running(server) == NUM_STREAMS)
            lab.point.write_text(point)
        if point not in SERVING:
            if point in STARTING:
                lab.point.write_text(point)
            os.kill(worker_pid(server), signal.SIGKILL)
        until(lambda: not lab.point.exists())
        died_s = time.monotonic()
        until(lambda: is_restarted(server, engine))
        restarted_s = time.monotonic() - died_s
        answers = [one.result() for one in streams]
        assert not streams or not all(map(is_complete, answers))
        last = lab.stream(NUM_STREAMS, lab.adapter)
        assert is_complete(last)
        server.process.send_signal(signal.SIGTERM)
        _, errors = server.process.communicate(timeout=60)
        assert server.process.returncode == 0, errors
    check_bills(lab.data, [*answers, last])
    print(f"\n{point}: {sum(map(is_complete, answers))} of {len(answers)} complete, ready after {restarted_s:.1f} s")
