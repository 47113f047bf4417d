"""Decode speed of a few streams on a CPU: loramux and llama.cpp on the same model with the same number of bits.

Both run in process, without HTTP, and take turns. A turn answers the same requests twice, once with one token each and
once with all tokens. The tokens after the first, divided by the difference of the two times, are the decode speed.
With one thread, `--clock cpu` measures processor time instead, which other programs on the machine change less. loramux
also runs three adapters over all streams, by default random ones of rank 16 on all linear layers. llama.cpp is
xllamacpp in an environment of its own, whose interpreter LORAMUX_PEER_XLLAMACPP_PYTHON names.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import TokenType

from benchmarks.answers import CheckError, RunFailed
from benchmarks.harness import SCRATCH, begin, new_parser, reports_failure, rotated
from benchmarks.mixed_batch import pack_adapters, pack_directories, run_loramux
from benchmarks.peers import in_process
from benchmarks.peers.vocabulary import FIRST_BYTE, FIRST_WORD, token_texts
from benchmarks.random_model import load_peft
from benchmarks.running_engine import RunningEngine, start_engine
from benchmarks.tables import table
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import EngineConfig
from loramux.engine.quantizing.quantize import quantize, quantized_directory
from tests.conformance.gguf_models import GgufFamily, write_base

PYTHON_VARIABLE = "LORAMUX_PEER_XLLAMACPP_PYTHON"
CHILD = Path(__file__).with_name("llama_child.py")
CONTEXT = 512
NUM_ADAPTERS, RANK = 3, 16
GOALS = {"one stream": 1.0, "all streams": 2.5, "adapters": 0.9}
"""Least speed of one stream and of sixteen streams relative to llama.cpp, and of adapters relative to the base."""

CLOCKS = {"wall": 0, "cpu": 1}

GGUF_TYPES = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_1"}
"""The type of llama.cpp's matrices, by the format of the layers."""

Run = Callable[[list[list[int]], int], tuple[float, float]]
"""Answers prompts with a number of tokens each, and returns the seconds of each of CLOCKS."""


def open_engine(base: Path, method: str, packed: Sequence[PackedAdapter], threads: int, activations: str | None) -> Any:
    """An engine with the base in the format `method`, a value of `--quantization` or `bfloat16`."""
    directory = None
    if method != "bfloat16":
        root = SCRATCH / "quantized"
        directory = quantized_directory(root, base, method)
        if not directory.exists():
            quantize(base, directory, method, lambda done, total: None)
    config = EngineConfig(
        model_dir=str(base), quantized_dir=None if directory is None else str(directory), blob_url="", cache_dir="",
        dtype="bfloat16", pool_bytes=512 << 20, num_threads=threads, max_model_len=CONTEXT,
        activations="int8" if activations == "int8" else None,
    )  # fmt: skip
    return start_engine(config, MemoryStager({one.digest: one for one in packed}))


def write_gguf(base: Path, method: str) -> Path:
    """A GGUF file of a base of the Llama architecture, in which all matrices have the type of `method`."""
    from transformers import LlamaForCausalLM

    dtype = GGUF_TYPES[method.partition("+")[0]]
    path = SCRATCH / "streams" / f"{base.name}-{dtype}.gguf"
    if not path.exists():
        model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
        part = path.with_suffix(".part")
        vocab_size = model.config.vocab_size
        kinds = [TokenType.CONTROL] * FIRST_BYTE + [TokenType.BYTE] * (FIRST_WORD - FIRST_BYTE)
        kinds += [TokenType.NORMAL] * (vocab_size - FIRST_WORD)
        vocabulary = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": token_texts(vocab_size),
            "tokenizer.ggml.scores": [0.0] * vocab_size,
            "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        }
        write_base(model, part, GgufFamily("llama", permutes=True), lambda name, shape: dtype, vocabulary)
        part.replace(path)
    return path


@contextmanager
def open_llama(gguf: Path, threads: int, slots: int) -> Iterator[Run]:
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        raise RunFailed(f"set {PYTHON_VARIABLE} to a Python interpreter that can import xllamacpp")
    command = [python, str(CHILD), str(gguf), str(threads), str(slots), str(CONTEXT)]
    log = SCRATCH / "streams" / "llama.log"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None

        def answer() -> Any:
            line = child.stdout.readline() if child.stdout else ""
            if not line:
                raise RunFailed(f"llama.cpp ended early: see {log}")
            return json.loads(line)

        def run(prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
            print(json.dumps([prompts, num_tokens]), file=child.stdin, flush=True)
            seconds, cpu_seconds = answer()
            return seconds, cpu_seconds

        try:
            answer()
            yield run
        finally:
            child.stdin.close()


def run_engine(
    engine: RunningEngine, digests: Sequence[str] | None, prompts: list[list[int]], num_tokens: int
) -> tuple[float, float]:
    begin = time.process_time()
    _, seconds = run_loramux(engine, torch.tensor(prompts), num_tokens, digests)
    return seconds, time.process_time() - begin


def check(engine: RunningEngine, digests: Sequence[str], prompts: torch.Tensor, num_tokens: int) -> None:
    """Raise CheckError unless each request has the same answer alone and together with the others."""
    for some in (None, digests):
        together, _ = run_loramux(engine, prompts, num_tokens, some)
        for row in range(len(prompts)):
            own = None if some is None else [some[row % len(some)]]
            alone, _ = run_loramux(engine, prompts[row : row + 1], num_tokens, own)
            if alone[0] != together[row]:
                raise CheckError(f"request {row} has another answer alone than in a batch of {len(prompts)}")


def measure(
    ways: Mapping[str, Run], prompts: list[list[int]], num_tokens: int, rounds: int, clock: int
) -> dict[str, float]:
    """The median decode speed of each way, in tokens per second of all streams together."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, run in rotated(list(ways.items()), number):
            first, all_tokens = run(prompts, 1)[clock], run(prompts, num_tokens)[clock]
            speeds[name].append(len(prompts) * (num_tokens - 1) / (all_tokens - first))
    return {name: statistics.median(found) for name, found in speeds.items()}


def ratios_of(cases: list[dict[str, Any]]) -> dict[str, float]:
    speeds = {case["streams"]: case["tokens_per_second"] for case in cases}
    one, most = speeds[min(speeds)], speeds[max(speeds)]
    return {
        "one stream": one["loramux"] / one["llama.cpp"],
        "all streams": most["loramux"] / most["llama.cpp"],
        "adapters": most["loramux, three adapters"] / most["loramux"],
    }


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("streams", __doc__)
    add = parser.add_argument
    add("--base", type=Path, required=True, help="directory of the model")
    add("--gguf", type=Path, help="the same model for llama.cpp; by default, written from a Llama base")
    add("--adapters", type=Path, nargs=NUM_ADAPTERS, help="directories of PEFT adapters instead of random ones")
    add("--format", default="int8+head", help="bfloat16, or a value of --quantization")
    add("--activations", choices=["int8", "int16"], default="int16", help="inputs of quantised linear layers")
    add("--streams", type=int, nargs="+", default=[1, 4, 16])
    add("--prompt", type=int, default=16)
    add("--tokens", type=int, default=64)
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--clock", choices=list(CLOCKS), default="wall")
    run = begin(parser.parse_args(argv))
    parsed, console = run.arguments, run.console
    if parsed.clock == "cpu" and parsed.threads > 1:
        parser.error("--clock cpu needs --threads 1: the time of waiting threads would count, too")
    model, most = ModelConfig.load(parsed.base), max(parsed.streams)
    with in_process.quiet_transformers():
        if parsed.adapters:
            packed = pack_directories(parsed.adapters, parsed.base, SCRATCH / "streams", "bfloat16")
        else:
            peft = load_peft(parsed.base, NUM_ADAPTERS, RANK, torch.bfloat16)
            packed = pack_adapters(peft, parsed.base, SCRATCH / "streams", NUM_ADAPTERS, "bfloat16")
            del peft
        gguf = parsed.gguf or write_gguf(parsed.base, parsed.format)
    prompts = torch.randint(10, model.vocab_size, (most, parsed.prompt), generator=torch.Generator().manual_seed(2))
    digests = [one.digest for one in packed]
    cases: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engine = stack.enter_context(
            open_engine(parsed.base, parsed.format, packed, parsed.threads, parsed.activations)
        )
        engine.load(digests)
        check(engine, digests, prompts, 8)
        llama = stack.enter_context(open_llama(gguf, parsed.threads, most))
        for streams in parsed.streams:
            ways = {
                "loramux": partial(run_engine, engine, None),
                "loramux, three adapters": partial(run_engine, engine, digests),
                "llama.cpp": llama,
            }
            found = measure(ways, prompts[:streams].tolist(), parsed.tokens, parsed.rounds, CLOCKS[parsed.clock])
            cases.append({"streams": streams, "tokens_per_second": {name: round(v, 1) for name, v in found.items()}})
    ratios = {name: round(value, 2) for name, value in ratios_of(cases).items()}
    rows = [(str(case["streams"]), *(f"{v:.1f}" for v in case["tokens_per_second"].values())) for case in cases]
    title = f"{parsed.format}, {parsed.threads} threads: tokens/s of all streams"
    console.print(table(title, ("streams", *cases[0]["tokens_per_second"]), rows))
    run.say({f"{name}, goal {GOALS[name]}": value for name, value in ratios.items()})
    workload = {
        name: getattr(parsed, name) for name in ("format", "activations", "prompt", "tokens", "threads", "clock")
    }
    shape = {"layers": model.num_layers, "hidden": model.hidden_size, "gguf": gguf.name}
    shape["adapters"] = [one.name for one in parsed.adapters] if parsed.adapters else f"rank {RANK}, all linear layers"
    run.write({"workload": {**workload, **shape}, "cases": cases, "ratios": ratios})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
