"""Runs llama.cpp's llama-server on files converted by llama.cpp's own scripts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.peers.child_server import HOST, ChildServer, child_server, free_port, server_environment
from benchmarks.peers.http_questions import Document, post_all, require_lengths
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import Peer, Running, System, SystemFailed, missing_peer
from benchmarks.peers.workload import MAX_TOKENS, PEER_KINDS, Answers, Question, Work

NAME = "llama-server"
SERVER_VARIABLE = "LORAMUX_PEER_LLAMA_SERVER"
SCRIPTS_VARIABLE = "LORAMUX_PEER_LLAMA_SCRIPTS"
PYTHON_VARIABLE = "LORAMUX_PEER_LLAMA_PYTHON"
ADVICE = (
    f"set {SERVER_VARIABLE} to the built llama-server, {SCRIPTS_VARIABLE} to the directory that contains "
    f"convert_hf_to_gguf.py, and {PYTHON_VARIABLE} to a Python interpreter with the requirements of that script"
)
QUANTIZER = "llama-quantize"
"""The program beside llama-server that writes quantised bases."""

BASE_SCRIPT, LORA_SCRIPT = "convert_hf_to_gguf.py", "convert_lora_to_gguf.py"
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
START_S = 300.0
FLOAT32 = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
"""Options for comparing answers. By default, K and V are in float16, and the rounding of flash attention can swap
nearly tied logits.
"""


@dataclass(frozen=True, slots=True)
class LlamaFiles:
    """Paths of the server binary, the conversion scripts and the Python interpreter that runs them."""

    server: Path
    scripts: Path
    python: Path


@dataclass(frozen=True, slots=True)
class LlamaServer:
    server: ChildServer
    url: str
    adapter_ids: Mapping[str, int]

    def answer(self, work: Work, *, needs_token_ids: bool) -> Answers:
        bodies = [question_body(question, work.num_output, self.adapter_ids) for question in work.questions]
        documents, seconds = post_all(f"{self.url}/completion", bodies)
        require_lengths(NAME, [document["tokens_predicted"] for document in documents], work)
        return Answers(seconds, tuple(tuple(document["tokens"]) for document in documents) if needs_token_ids else None)


def question_body(question: Question, num_output: int, adapter_ids: Mapping[str, int]) -> Document:
    """The body of one request. The server turns off adapters missing from `lora`, but ignores an empty list."""
    lora = {"id": 0, "scale": 0.0} if question.adapter is None else {"id": adapter_ids[question.adapter], "scale": 1.0}
    return {
        "prompt": list(question.prompt),
        "n_predict": num_output,
        "temperature": 0.0,
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "lora": [lora],
    }


def llama_command(
    found: LlamaFiles,
    files: ModelFiles,
    outtype: str,
    threads: int,
    port: int,
    is_check: bool,
    quantized: str | None = None,
) -> list[str]:
    """The server's command line. Each concurrent request has its own slot, with room for the longest request.

    `outtype` is the format of the adapters and, without `quantized`, also of the base.
    """
    adapters = ",".join(str(lora_file(files, name, outtype)) for name in files.adapters)
    slots = files.num_adapters
    command = [
        *(str(found.server), "--model", str(base_file(files, quantized or outtype))),
        *("--host", HOST, "--port", str(port)),
        *("--lora", adapters, "--lora-init-without-apply", "--parallel", str(slots)),
        *("--ctx-size", str(slots * MAX_TOKENS), "--threads", str(threads), "--threads-batch", str(threads)),
    ]
    return [*command, *FLOAT32] if is_check else command


def base_file(files: ModelFiles, outtype: str) -> Path:
    return files.directory / "gguf" / f"base-{outtype}.gguf"


def lora_file(files: ModelFiles, name: str, outtype: str) -> Path:
    return files.directory / "gguf" / f"{name}-{outtype}.gguf"


def convert(found: LlamaFiles, files: ModelFiles, outtype: str) -> None:
    """Convert the files that do not exist yet. Raises SystemFailed with the script's last output."""
    base = base_file(files, outtype)
    if not base.exists():
        base.parent.mkdir(exist_ok=True)
        _run_script(found, BASE_SCRIPT, base, outtype, str(files.base))
    missing = [name for name in files.adapters if not lora_file(files, name, outtype).exists()]

    def convert_one(name: str) -> None:
        arguments = ("--base", str(files.base), str(files.adapters[name]))
        _run_script(found, LORA_SCRIPT, lora_file(files, name, outtype), outtype, *arguments)

    # Each script spends most of its time importing torch, so run several in parallel to use all cores.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(convert_one, missing))


def quantize(found: LlamaFiles, files: ModelFiles, quantized: str) -> Path:
    """Return the path of the base in one of llama.cpp's formats, such as Q8_0. llama.cpp's own quantiser writes it if
    it does not exist.
    """
    path = base_file(files, quantized)
    if not path.exists():
        convert(found, files, "bf16")
        _run([str(found.server.with_name(QUANTIZER)), str(base_file(files, "bf16"))], [quantized], path)
    return path


def _run_script(found: LlamaFiles, script: str, out: Path, outtype: str, *arguments: str) -> None:
    command = [str(found.python), str(found.scripts / script), "--outtype", outtype, "--outfile"]
    _run(command, arguments, out, f" ({PYTHON_VARIABLE} names the Python that runs it)")


def _run(before: Sequence[str], after: Sequence[str], out: Path, advice: str = "") -> None:
    """Run a command with the output file's path between `before` and `after`. The file appears only once it is
    complete.
    """
    part = out.with_suffix(".part")
    command = [*before, str(part), *after]
    ran = subprocess.run(command, capture_output=True, text=True, env=server_environment({}), check=False)
    if ran.returncode != 0:
        last = "\n".join(ran.stderr.splitlines()[-10:])
        name = next(Path(word).name for word in command if word.endswith((".py", QUANTIZER)))
        raise SystemFailed(f"{name} failed{advice}:\n{last}")
    part.rename(out)


@contextlib.contextmanager
def open_llama(
    found: LlamaFiles,
    dtype: str,
    threads: int,
    logs: Path,
    say: Callable[[str], None],
    files: ModelFiles,
    is_check: bool,
    quantized: str | None = None,
) -> Iterator[Running]:
    """Run the server with adapters in `dtype`, and with the base in `dtype` or in the format `quantized`."""
    outtype = OUTTYPES[dtype]
    if not lora_file(files, "a0", outtype).exists():
        say(f"  converting files to {outtype} for llama.cpp; this takes minutes, but only once")
    convert(found, files, outtype)
    if quantized is not None:
        quantize(found, files, quantized)
    port = free_port()
    command = llama_command(found, files, outtype, threads, port, is_check, quantized)
    with child_server(
        NAME, command, server_environment({}), logs / f"llama-server-{quantized or outtype}.log"
    ) as server:
        url = f"http://{HOST}:{port}"
        server.wait_until_ready(f"{url}/health", START_S)
        yield LlamaServer(server, url, {name: index for index, name in enumerate(files.adapters)})


def locate_llama(variables: Mapping[str, str]) -> LlamaFiles | None:
    """The paths that the environment variables name, which may not exist. None if a required variable is not set."""
    if not (variables.get(SERVER_VARIABLE) and variables.get(SCRIPTS_VARIABLE)):
        return None
    return LlamaFiles(
        Path(variables[SERVER_VARIABLE]).absolute(),
        Path(variables[SCRIPTS_VARIABLE]).absolute(),
        Path(variables.get(PYTHON_VARIABLE) or sys.executable).absolute(),
    )


def find_llama(
    variables: Mapping[str, str], threads: int, logs: Path, say: Callable[[str], None], quantized: str | None = None
) -> Peer:
    """llama-server in each dtype, or with a base in the format `quantized` and adapters in bfloat16."""
    found = locate_llama(variables)
    if found is None:
        return missing_peer(NAME, ADVICE)
    programs = [found.server, found.python, *([found.server.with_name(QUANTIZER)] if quantized else [])]
    absent = [str(path) for path in programs if not os.access(path, os.X_OK)]
    absent += [str(found.scripts / name) for name in (BASE_SCRIPT, LORA_SCRIPT) if not (found.scripts / name).is_file()]
    if absent:
        return missing_peer(NAME, f"there is no {' and no '.join(absent)}: {ADVICE}")
    shown = subprocess.run([str(found.server), "--version"], capture_output=True, text=True, check=False)
    lines = (shown.stdout + shown.stderr).splitlines()
    version = next((line.removeprefix("version: ") for line in lines if line.startswith("version: ")), "unknown")
    if quantized is not None:
        opened = partial(open_llama, found, "bfloat16", threads, logs, say, quantized=quantized)
        system = System(NAME, quantized, PEER_KINDS, opened)
        return Peer(NAME, version, (system,), system)
    systems = {
        dtype: System(NAME, dtype, PEER_KINDS, partial(open_llama, found, dtype, threads, logs, say))
        for dtype in OUTTYPES
    }
    return Peer(NAME, version, tuple(systems.values()), systems["float32"])
