"""Hours of mixed traffic on a server whose memory and disk must stay flat: `python -m tests.reliability.soak`.

Clients send chats, completions, responses, messages and embeddings, whole and streamed, and cut some streams. Others
run batches, and push, call and purge adapters, and create and delete keys. What they store, they delete.
Requests follow one another without the pauses of real users. An hour has as many requests as a longer time of real use.

The memory, descriptors and threads of each process, the rows of each table and the files in the data directory are
sampled. Each series must not grow after the first eighth of the run: see `growth.py`. What is kept on purpose is in
KEPT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import func, select

from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import push_adapter
from loramux.migrations.database import Database
from loramux.migrations.schema import metadata
from tests.conformance.demo_adapters import DEMO, changed_adapter
from tests.conformance.served import Deployment, deployment
from tests.reliability.growth import block_medians, growth
from tests.reliability.process_samples import Sampler, process_usage
from tests.reliability.record import recorded

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
NUM_CLIENTS = 6
NUM_SAMPLES = 400
LOG_LINES = 200
SHORTEST_INTERVAL_S = 0.25
RESOLUTIONS = {"MB": 0.05}
"""Growth that does not count, by unit, as a part of the median."""

KEPT: Mapping[str, str] = {
    "usage_events": "the ledger",
    "usage_series": "sums of the ledger",
    "usage_rollups": "sums of the ledger",
    "audit_log": "every change by an administrator",
    "events": "events, until they are a month old",
    "batches": "batches, which OpenAI's API cannot delete",
    "retired_numbers": "version numbers, which are never used again",
    "api_keys": "revoked keys, which reports name",
    "purges": "purged weights, which servers go on deleting for 30 days",
}
"""Tables that grow with use, and why."""

Action = Callable[[], None]


@dataclass(slots=True)
class Seen:
    requests: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    """Why actions failed. Every request is valid and within its limits, so none should be refused."""


class Traffic:
    """Runs its actions in threads, each again and again, during a `with` block."""

    def __init__(self, deployment: Deployment, key: str, directory: Path) -> None:
        self.seen = Seen()
        self._deployment = deployment
        self._key = key
        self._directory = directory
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        actions = [self._client(number) for number in range(NUM_CLIENTS)] + [self._batches, self._adapters, self._keys]
        self._threads = [threading.Thread(target=self._repeat, args=(one,)) for one in actions]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, action: Action) -> None:
        while not self._is_over.is_set():
            try:
                action()
            except Exception as error:
                self._fail(f"{action.__name__}: {error!r}")
                self._is_over.wait(0.5)

    def _note(self, kind: str) -> None:
        with self._lock:
            self.seen.requests[kind] += 1

    def _fail(self, failure: str) -> None:
        with self._lock:
            self.seen.failed.append(failure)

    def _http(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self._deployment.port}/v1",
            headers={"authorization": f"Bearer {self._key}", "anthropic-version": "2023-06-01"},
            timeout=60,
            trust_env=False,
        )

    def _call(self, http: httpx.Client, kind: str, method: str, path: str, **options: Any) -> Any:
        answer = http.request(method, path, **options)
        self._note(kind)
        if not answer.is_success:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json()

    def _client(self, number: int) -> Action:
        dice = random.Random(number)

        def client() -> None:
            # A new connection for some requests.
            with self._http() as http:
                for _ in range(20):
                    if self._is_over.is_set():
                        return
                    dice.choice((self._chat, self._completion, self._response, self._message, self._embedding))(
                        http, dice
                    )

        return client

    def _chat(self, http: httpx.Client, dice: random.Random) -> None:
        body = {"model": dice.choice(MODELS), "messages": _messages(dice), "max_tokens": dice.randrange(1, 20)}
        if dice.random() < 0.2:
            stored = self._call(http, "stored chats", "POST", "/chat/completions", json=body | {"store": True})
            self._call(http, "deletions", "DELETE", f"/chat/completions/{stored['id']}")
        else:
            self._call(http, "chats", "POST", "/chat/completions", json=body)

    def _completion(self, http: httpx.Client, dice: random.Random) -> None:
        body = {"model": dice.choice(MODELS), "prompt": _text(dice), "max_tokens": dice.randrange(1, 40)}
        if dice.random() < 0.2:
            body["guided_regex"] = f"[a-{dice.choice('bcdefgh')}]+"
        if dice.random() < 0.5:
            self._call(http, "completions", "POST", "/completions", json=body)
            return
        with http.stream("POST", "/completions", json=body | {"stream": True}) as answer:
            self._note("streams")
            answer.raise_for_status()
            # The client leaves after some events. The connection is not used again.
            for number, _ in enumerate(answer.iter_lines()):
                if number >= dice.randrange(30):
                    self._note("disconnects")
                    break

    def _response(self, http: httpx.Client, dice: random.Random) -> None:
        is_stored = dice.random() < 0.3
        body = {"model": dice.choice(MODELS), "input": _text(dice), "max_output_tokens": 16, "store": is_stored}
        answer = self._call(http, "responses", "POST", "/responses", json=body)
        if is_stored:
            self._call(http, "deletions", "DELETE", f"/responses/{answer['id']}")

    def _message(self, http: httpx.Client, dice: random.Random) -> None:
        body = {"model": dice.choice(MODELS), "messages": _messages(dice), "max_tokens": dice.randrange(1, 20)}
        self._call(http, "messages", "POST", "/messages", json=body)

    def _embedding(self, http: httpx.Client, dice: random.Random) -> None:
        body = {"model": dice.choice(MODELS), "input": [_text(dice) for _ in range(dice.randrange(1, 4))]}
        self._call(http, "embeddings", "POST", "/embeddings", json=body)

    def _batches(self) -> None:
        """Run a batch, and delete its files."""
        dice = random.Random()
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": dice.choice(MODELS), "prompt": _text(dice), "max_tokens": 4},
            }
            for number in range(10)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        with self._http() as http:
            file = self._call(
                http, "files", "POST", "/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}
            )
            asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = self._call(http, "batches", "POST", "/batches", json=asked)
            until_s = time.monotonic() + 120
            while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
                if time.monotonic() > until_s:
                    raise TimeoutError(f"the batch is {batch['status']}")
                time.sleep(0.2)
                batch = self._call(http, "looks at batches", "GET", f"/batches/{batch['id']}")
            for one in (batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]):
                if one is not None:
                    self._call(http, "deletions", "DELETE", f"/files/{one}")

    def _adapters(self) -> None:
        """Push an adapter with new weights, call it, and purge it."""
        directory = self._directory / "pushed"
        changed_adapter(directory, random.uniform(0.5, 1.5))
        try:
            with self._admin() as admin, self._http() as http:
                push_adapter(admin, directory, "acme", "passing")
                self._note("pushes")
                body = {"model": "acme/passing", "prompt": "The ship", "max_tokens": 4}
                self._call(http, "completions", "POST", "/completions", json=body)
                [adapter] = [one for one in admin.get("adapters", tenant="acme")["data"] if one["name"] == "passing"]
                admin.post(f"adapters/{adapter['id']}/purge", {"confirm": "acme/passing"})
                self._note("purges")
        finally:
            shutil.rmtree(directory)

    def _keys(self) -> None:
        with self._admin() as admin:
            key = admin.post("api_keys", {"tenant": "acme"})
            admin.delete(f"api_keys/{key['id']}")
        self._note("keys")
        self._is_over.wait(1)

    def _admin(self) -> AdminClient:
        return AdminClient(f"http://127.0.0.1:{self._deployment.admin_port}", self._deployment.admin_key)


MODELS = ("demo-base", "acme/steady-0", "acme/steady-1")


def _text(dice: random.Random) -> str:
    return " ".join(
        dice.choices(("ship", "sea", "storm", "gold", "the", "a", "old", "captain"), k=dice.randrange(3, 60))
    )


def _messages(dice: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(dice)}]


def stored(database: Database, data: Path) -> Mapping[str, float]:
    """The rows of each table that is not in KEPT, and the files outside the database."""
    tables = [table for name, table in metadata.tables.items() if name not in KEPT]
    with database.read() as connection:
        rows = {
            f"{table.name}: rows": float(connection.execute(select(func.count()).select_from(table)).scalar_one())
            for table in tables
        }
    sizes = []
    for folder, _, names in os.walk(data):
        for name in names:
            # The server can delete a file meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if not name.startswith("loramux.db"):
                    sizes.append(os.stat(os.path.join(folder, name)).st_size)
    return {**rows, "files": float(len(sizes)), "files, MB": sum(sizes) / 1e6}


def soak(hours: float, directory: Path) -> tuple[Seen, Mapping[str, list[float]]]:
    """What the traffic saw, and the samples of each series."""
    base, data = shutil.copytree(DEMO / "base", directory / "base"), directory / "data"
    (base / "chat_template.jinja").write_text(TEMPLATE)
    # Small caches and a small pool, which are full before the first eighth is over.
    environment = {
        "LORAMUX_DISK_TIER_BYTES": "16MiB",
        "LORAMUX_HOST_TIER_BYTES": "8MiB",
        "LORAMUX_MAX_RESIDENT_ADAPTERS": "4",
        "LORAMUX_POOL_BYTES": "64MiB",
        "LORAMUX_RESPONSE_KEY": "0123456789abcdef0123456789abcdef",
    }
    made = deployment(base, data, (), environment)
    with made.running(directory / "server.log") as server:
        made.json("tenants", "create", "acme")
        made.json("tenants", "set", "acme", "--response-days", "1")
        key = made.json("keys", "create", "--tenant", "acme")["secret"]
        for number in range(2):
            files = changed_adapter(directory / f"steady-{number}", 1 + number / 10)
            made.json("adapters", "push", str(files), "--tenant", "acme", "--name", f"steady-{number}")
        database = Database(f"sqlite:///{data / 'loramux.db'}")
        seconds = hours * 3600
        with (
            Traffic(made, key, directory) as traffic,
            Sampler(
                lambda: {**process_usage(server.pid), **stored(database, data)},
                max(SHORTEST_INTERVAL_S, seconds / NUM_SAMPLES),
            ) as sampler,
        ):
            threading.Event().wait(seconds)
        database.close()
    return traffic.seen, sampler.series


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=8.0)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="loramux-soak-") as directory, recorded("soak") as figures:
        seen, series = soak(arguments.hours, Path(directory))
        if seen.failed:
            print("".join((Path(directory) / "server.log").read_text().splitlines(keepends=True)[-LOG_LINES:]))
        growing = []
        print(f"{dict(seen.requests)}\n{len(series)} series")
        for name, samples in sorted(series.items()):
            rise, bound = growth(samples, RESOLUTIONS.get(name.rpartition(" ")[2], 0.0))
            if rise > bound:
                growing.append(name)
            if rise > bound / 2:
                medians = " ".join(f"{one:.6g}" for one in block_medians(samples))
                print(f"{name}: {rise:+.2f}, {'GROWS' if rise > bound else 'bound'} {bound:.2f}: {medians}")
        print("\n".join(seen.failed[:20]))
        figures |= {
            "hours": arguments.hours,
            "requests": seen.requests.total(),
            "failed": len(seen.failed),
            "series": len(series),
            "growing": len(growing),
        }
    return 1 if growing or seen.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
