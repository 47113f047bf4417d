from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import FILE_NAMES, push_adapter

TIMEOUT_S = 60.0

Counts = Counter[str]
"""Number of responses by status and, for errors, error code."""


@dataclass(frozen=True, slots=True)
class PeftFiles:
    config: bytes
    tensors: bytes

    @classmethod
    def read(cls, directory: Path) -> PeftFiles:
        config, tensors = ((directory / name).read_bytes() for name in FILE_NAMES)
        return cls(config, tensors)

    def valid(self, number: int) -> PeftFiles:
        """The adapter with a different `lora_alpha`, so that its bytes and digest differ."""
        document = json.loads(self.config)
        document["lora_alpha"] = float(document["lora_alpha"]) + number / 1000
        return PeftFiles(json.dumps(document).encode(), self.tensors)

    def invalid(self, number: int) -> PeftFiles:
        """The adapter with a truncated tensors file."""
        return PeftFiles(self.valid(number).config, self.tensors[: -1 - number])

    def contents(self) -> dict[str, bytes]:
        return dict(zip(FILE_NAMES, (self.config, self.tensors), strict=True))


def open_without_end(admin_url: str, key: str, adapter_id: str, size: int, num_calls: int) -> Counts:
    """Declare `num_calls` uploads of `size` bytes without sending any files."""
    counts = Counts()
    with _client(admin_url, key) as http:
        for _ in range(num_calls):
            _declare(http, adapter_id, {FILE_NAMES[0]: 1, FILE_NAMES[1]: size - 1}, counts)
    return counts


def cancel_uploads(admin_url: str, key: str, adapter_id: str) -> None:
    url = f"/admin/v1/adapters/{adapter_id}/uploads"
    with _client(admin_url, key) as http:
        while found := http.get(url, params={"limit": 100}).json()["data"]:
            for upload in found:
                http.delete(f"{url}/{upload['id']}").raise_for_status()


def flood_versions(
    admin_url: str, key: str, adapter_id: str, files: Sequence[PeftFiles], num_threads: int = 4
) -> Counts:
    """Push versions as fast as the server accepts them. Never wait for validation or retry a refused push."""

    def push(one: PeftFiles) -> Counts:
        counts = Counts()
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

    # Use one client for all threads, because creating a client takes tens of milliseconds of CPU time.
    with _client(admin_url, key) as http, ThreadPoolExecutor(num_threads) as threads:
        return sum(threads.map(push, files), Counts())


def time_push(admin_url: str, key: str, tenant: str, name: str, files: PeftFiles, directory: Path) -> float:
    """Push a version and return the seconds until it is ready."""
    directory.mkdir(parents=True, exist_ok=True)
    for file_name, data in files.contents().items():
        (directory / file_name).write_bytes(data)
    started_s = time.monotonic()
    with AdminClient(admin_url, key, TIMEOUT_S) as client:
        push_adapter(client, directory, tenant, name)
    return time.monotonic() - started_s


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
    """Declare an upload and return its document, or None if the upload is refused."""
    files = [
        {"name": name, "size": size, "sha256": hashlib.sha256((contents or {}).get(name, b"")).hexdigest()}
        for name, size in sizes.items()
    ]
    answer = http.post(f"/admin/v1/adapters/{adapter_id}/uploads", json={"files": files})
    counts[_told(answer)] += 1
    return answer.json() if answer.is_success else None


def _told(answer: httpx.Response) -> str:
    return str(answer.status_code) if answer.is_success else f"{answer.status_code} {answer.json()['error']['code']}"
