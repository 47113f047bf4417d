"""Floods of uploads, versions and preloads by one tenant, and what a polite tenant's push and requests take beside.

    python -m tests.adversary.ingest_flood --admin-url URL --api-url URL/v1 --operator-key KEY --adapter PEFT_DIR

makes two tenants on a running server, measures the polite one alone and beside the attack, and prints JSON. Each
attack is bounded, and answers how often each status and code came.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loramux.admin.client import AdminClient
from loramux.admin.push import FILE_NAMES, push_adapter

TIMEOUT_S = 60.0

Counts = Counter[str]
"""How often each answer came: its status, and behind it the code of a refusal."""


@dataclass(frozen=True, slots=True)
class PeftFiles:
    """An adapter's two files."""

    config: bytes
    tensors: bytes

    @classmethod
    def read(cls, directory: Path) -> PeftFiles:
        config, tensors = ((directory / name).read_bytes() for name in FILE_NAMES)
        return cls(config, tensors)

    def valid(self, number: int) -> PeftFiles:
        """The same adapter with another scale: bytes and a digest of its own."""
        document = json.loads(self.config)
        document["lora_alpha"] = float(document["lora_alpha"]) + number / 1000
        return PeftFiles(json.dumps(document).encode(), self.tensors)

    def invalid(self, number: int) -> PeftFiles:
        """The same with the last bytes of the tensors cut off."""
        return PeftFiles(self.valid(number).config, self.tensors[: -1 - number])

    def contents(self) -> dict[str, bytes]:
        return dict(zip(FILE_NAMES, (self.config, self.tensors), strict=True))


def open_without_end(admin_url: str, key: str, adapter_id: str, size: int, num_calls: int) -> Counts:
    """Declare uploads of `size` bytes and send none of the files."""
    counts = Counts()
    with _client(admin_url, key) as http:
        for _ in range(num_calls):
            _declare(http, adapter_id, {FILE_NAMES[0]: 1, FILE_NAMES[1]: size - 1}, counts)
    return counts


def flood_versions(
    admin_url: str, key: str, adapter_id: str, files: Sequence[PeftFiles], num_threads: int = 4
) -> Counts:
    """Push versions as fast as the server takes them, and wait for none; what is refused is left."""

    def push(one: PeftFiles) -> Counts:
        counts = Counts()
        with _client(admin_url, key) as http:
            contents = one.contents()
            upload = _declare(http, adapter_id, {name: len(data) for name, data in contents.items()}, counts, contents)
            if upload is None:
                return counts
            for file in upload["files"]:
                answer = http.put(file["url"], content=contents[file["name"]])
                counts[_told(answer)] += 1
            body = {"upload_id": upload["id"]}
            counts[_told(http.post(f"/admin/v1/adapters/{adapter_id}/versions", json=body))] += 1
        return counts

    with ThreadPoolExecutor(num_threads) as threads:
        return sum(threads.map(push, files), Counts())


def flood_preloads(admin_url: str, key: str, adapter_id: str, num_versions: int, num_calls: int) -> Counts:
    """Preload an adapter's versions one after the other, again and again."""
    counts = Counts()
    with _client(admin_url, key) as http:
        for call in range(num_calls):
            path = f"/admin/v1/adapters/{adapter_id}/versions/{call % num_versions + 1}/preload"
            counts[_told(http.post(path))] += 1
    return counts


def time_push(admin_url: str, key: str, tenant: str, name: str, files: PeftFiles, directory: Path) -> float:
    """Seconds from the start of a push to READY."""
    directory.mkdir(parents=True, exist_ok=True)
    for file_name, data in files.contents().items():
        (directory / file_name).write_bytes(data)
    started_s = time.monotonic()
    with AdminClient(admin_url, key, TIMEOUT_S) as client:
        push_adapter(client, directory, tenant, name)
    return time.monotonic() - started_s


def times_to_first_token(
    api_url: str, key: str, model: str, is_over: Callable[[], bool], min_requests: int = 20
) -> tuple[list[float], Counts]:
    """Seconds to the first event of streams, one after the other, until `is_over`; and every status that came."""
    times: list[float] = []
    counts = Counts()
    body = {"model": model, "prompt": "Hello", "max_tokens": 8, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers) as http:
        while len(times) < min_requests or not is_over():
            started_s = time.monotonic()
            with http.stream("POST", f"{api_url}/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines, None)
                times.append(time.monotonic() - started_s)
                for _ in lines:
                    continue
            counts[str(answer.status_code)] += 1
    return times, counts


def campaign(
    admin_url: str, api_url: str, operator_key: str, files: PeftFiles, directory: Path, num_versions: int
) -> dict[str, Any]:
    """Measure a polite tenant alone, then beside `num_versions` pending versions of another, half of them invalid."""
    run = secrets.token_hex(3)
    with AdminClient(admin_url, operator_key, TIMEOUT_S) as operator:
        keys = {}
        for tenant in (f"polite-{run}", f"attacker-{run}"):
            operator.post("tenants", {"slug": tenant})
            for scopes in (["tenant:admin"], ["adapters"]):
                made = operator.post("api_keys", {"tenant": tenant, "scopes": scopes})
                keys[tenant, scopes[0]] = made["secret"]
        adapter_id = operator.post("adapters", {"tenant": f"attacker-{run}", "name": "flood"})["id"]
    polite, attacker = f"polite-{run}", f"attacker-{run}"
    pusher, caller = keys[polite, "tenant:admin"], keys[polite, "adapters"]
    seed = secrets.randbelow(100_000) + 1

    def push(number: int) -> float:
        return time_push(admin_url, pusher, polite, "support", files.valid(seed + number), directory / str(number))

    push(0)
    alone_s = [push(1), push(2)]
    alone, alone_counts = times_to_first_token(api_url, caller, f"{polite}/support", lambda: True, min_requests=100)
    flood = [files.valid(seed + 1000 + n) if n % 2 else files.invalid(n) for n in range(num_versions)]
    answers: list[Counts] = []
    attack = threading.Thread(
        target=lambda: answers.append(flood_versions(admin_url, keys[attacker, "tenant:admin"], adapter_id, flood))
    )
    attack.start()
    _await_pending(admin_url, keys[attacker, "tenant:admin"], num_versions // 4)
    beside_s: list[float] = []
    pushes = threading.Thread(target=lambda: beside_s.extend([push(3), push(4)]))
    pushes.start()

    def is_over() -> bool:
        return not attack.is_alive() and not pushes.is_alive() and not _num_pending(admin_url, operator_key)

    beside, beside_counts = times_to_first_token(api_url, caller, f"{polite}/support", is_over, min_requests=100)
    attack.join()
    pushes.join()
    return {
        "num_versions": num_versions,
        "attack": dict(answers[0]),
        "push_alone_s": alone_s,
        "push_beside_s": beside_s,
        "first_token_p99_alone_s": _p99(alone),
        "first_token_p99_beside_s": _p99(beside),
        "statuses": dict(alone_counts + beside_counts),
        "open_uploads": dict(open_without_end(admin_url, keys[attacker, "tenant:admin"], adapter_id, 1000, 80)),
        "preloads": dict(flood_preloads(admin_url, keys[attacker, "tenant:admin"], adapter_id, 8, 40)),
    }


def _client(admin_url: str, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=admin_url, headers=headers, timeout=TIMEOUT_S, trust_env=False)


def _declare(
    http: httpx.Client,
    adapter_id: str,
    sizes: dict[str, int],
    counts: Counts,
    contents: dict[str, bytes] | None = None,
) -> Any:
    """Declare an upload; the document, or None where it is refused."""
    files = [
        {"name": name, "size": size, "sha256": hashlib.sha256((contents or {}).get(name, b"")).hexdigest()}
        for name, size in sizes.items()
    ]
    answer = http.post(f"/admin/v1/adapters/{adapter_id}/uploads", json={"files": files})
    counts[_told(answer)] += 1
    return answer.json() if answer.is_success else None


def _told(answer: httpx.Response) -> str:
    return str(answer.status_code) if answer.is_success else f"{answer.status_code} {answer.json()['error']['code']}"


def _num_pending(admin_url: str, key: str) -> int:
    with _client(admin_url, key) as http:
        return len(http.get("/admin/v1/jobs", params={"limit": 100}).json()["data"])


def _await_pending(admin_url: str, key: str, num_versions: int) -> None:
    """Wait until so many versions are queued, at most for half a minute."""
    for _ in range(300):
        if _num_pending(admin_url, key) >= num_versions:
            return
        time.sleep(0.1)


def _p99(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--admin-url", default="http://127.0.0.1:8001")
    parser.add_argument("--api-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--operator-key", required=True)
    parser.add_argument("--adapter", type=Path, required=True, help="what peft saved for the served base")
    parser.add_argument("--scratch", type=Path, required=True, help="a directory for the files of pushes")
    parser.add_argument("--versions", type=int, default=60)
    options = parser.parse_args()
    files = PeftFiles.read(options.adapter)
    found = campaign(options.admin_url, options.api_url, options.operator_key, files, options.scratch, options.versions)
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
