"""Runs `loramux serve`, pushes every adapter over the admin REST API, and sends requests as to any OpenAI server."""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.peers.child_server import HOST, NO_DRAFTS, ChildServer, child_server, free_port, own_environment
from benchmarks.peers.http_questions import Document, complete_all
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import LORAMUX, Running, System
from benchmarks.peers.vocabulary import token_ids_of
from benchmarks.peers.workload import KINDS, Answers, Work
from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import push_adapter

TENANT = "bench"
BASE_NAME = "base"
START_S = 300.0


@dataclass(frozen=True, slots=True)
class LoramuxServer:
    server: ChildServer
    url: str
    api_key: str
    models: Mapping[str, str]
    """The model name to request, by adapter."""

    def complete(self, work: Work, extra: Document) -> tuple[list[Document], float]:
        adapters = {question.adapter for question in work.questions}
        models = {adapter: self.models[adapter] if adapter else BASE_NAME for adapter in adapters}
        return complete_all(LORAMUX, self.url, work, models, extra, self.api_key)

    def answer(self, work: Work, *, needs_token_ids: bool) -> Answers:
        extra = {"logprobs": 0} if needs_token_ids else {}
        documents, seconds = self.complete(work, extra)
        if not needs_token_ids:
            return Answers(seconds, None)
        spelled = [document["choices"][0]["logprobs"]["tokens"] for document in documents]
        return Answers(seconds, tuple(tuple(token_ids_of(tokens)) for tokens in spelled))


def loramux_command(
    files: ModelFiles,
    data_dir: Path,
    dtype: str,
    port: int,
    admin_port: int,
    quantization: str | None = None,
    activations: str | None = None,
) -> list[str]:
    return [
        *(sys.executable, "-m", "loramux.admin.cli", "serve", "--model", str(files.base), "--data-dir", str(data_dir)),
        *("--host", HOST, "--port", str(port), "--admin-port", str(admin_port)),
        *("--dtype", dtype, "--device", "cpu", "--served-name", BASE_NAME, *NO_DRAFTS),
        *(() if quantization is None else ("--quantization", quantization)),
        *(() if activations is None else ("--activations", activations)),
    ]


def loramux_environment(admin_key: str, threads: int, pool_bytes: str) -> dict[str, str]:
    settings = {"ADMIN_KEY": admin_key, "NUM_THREADS": str(threads), "POOL_BYTES": pool_bytes}
    return own_environment({f"LORAMUX_{name}": value for name, value in settings.items()})


def push_adapters(admin_url: str, admin_key: str, directories: Mapping[str, Path]) -> tuple[str, dict[str, str]]:
    """Create a tenant with these adapters. Return its API key, and the model name to request for each adapter."""
    with AdminClient(admin_url, admin_key) as client:
        client.post("tenants", {"slug": TENANT})
        api_key = client.post("api_keys", {"tenant": TENANT, "name": "bench"})["secret"]
        return api_key, {name: push_adapter(client, path, TENANT, name).model for name, path in directories.items()}


@contextlib.contextmanager
def open_loramux(
    dtype: str,
    threads: int,
    logs: Path,
    files: ModelFiles,
    is_check: bool,
    pool_bytes: str = "1GiB",
    quantization: str | None = None,
    activations: str | None = None,
) -> Iterator[Running]:
    port, admin_port, admin_key = free_port(), free_port(), secrets.token_urlsafe(32)
    environment = loramux_environment(admin_key, threads, pool_bytes)
    with tempfile.TemporaryDirectory(prefix="loramux-peers-") as folder:
        command = loramux_command(files, Path(folder), dtype, port, admin_port, quantization, activations)
        with child_server(LORAMUX, command, environment, logs / f"loramux-{dtype}.log") as server:
            admin_url = f"http://{HOST}:{admin_port}"
            server.wait_until_ready(f"{admin_url}/health/ready", START_S)
            api_key, models = push_adapters(admin_url, admin_key, files.adapters | files.attention_adapters)
            yield LoramuxServer(server, f"http://{HOST}:{port}", api_key, models)


def loramux_system(dtype: str, threads: int, logs: Path) -> System:
    return System(LORAMUX, dtype, KINDS, partial(open_loramux, dtype, threads, logs))
