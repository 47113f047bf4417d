"""Sixteen requests with sixteen adapters in one batch: loramux with and without adapters, and peft's two methods.

Everything runs in process on a CPU, in one run, after the answers have been compared. peft's mixed batch is a static
batch in which all requests start and end together, which favours peft.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save

from benchmarks.answers import CheckError
from benchmarks.harness import SCRATCH, begin, new_parser, reports_failure
from benchmarks.peers import in_process
from benchmarks.random_model import SHAPES, load_peft, make_base
from benchmarks.running_engine import RunningEngine, greedy_adds, start_engine
from benchmarks.tables import table
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.module_places import module_places
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.validation.validation import validate_files
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import EngineConfig, pack_target

NUM_CHECKED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    seconds: list[float]
    num_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / statistics.median(self.seconds)


def pack_adapters(model: Any, base: Path, scratch: Path, num_adapters: int, dtype: str) -> list[PackedAdapter]:
    """Save peft's adapters, then validate, canonicalise and pack them like an upload."""
    directory = scratch / "adapters"
    model.save_pretrained(directory)
    return pack_directories([directory / f"a{index}" for index in range(num_adapters)], base, scratch, dtype)


def pack_directories(directories: Sequence[Path], base: Path, scratch: Path, dtype: str) -> list[PackedAdapter]:
    """Validate, canonicalise and pack the files of PEFT adapters like an upload."""
    target, packed = pack_target(ModelConfig.load(base), dtype), []
    scratch.mkdir(parents=True, exist_ok=True)
    for directory in directories:
        config = (directory / "adapter_config.json").read_bytes()
        tensors = directory / "adapter_model.safetensors"
        packed.append(_pack(config, tensors, target, scratch / f"{directory.name}.safetensors"))
    return packed


def _pack(
    config: bytes, tensors: Path | bytes, target: PackTarget, canonical: Path, weights: BaseWeights | None = None
) -> PackedAdapter:
    write_canonical(tensors, validate_files(config, tensors, target).scales, canonical)
    return pack(canonical, target, weights)


def pack_with_magnitudes(base: Path, scratch: Path, num_adapters: int, dtype: str) -> list[PackedAdapter]:
    """Pack the saved adapters as DoRA adapters with the same effect. The magnitudes are the norms of the changed
    weight's rows.
    """
    weights, target = BaseWeights(base), pack_target(ModelConfig.load(base), dtype)
    places = {place.a_name: place for place in module_places(target)}
    packed = []
    for index in range(num_adapters):
        saved = scratch / "adapters" / f"a{index}"
        config = json.loads((saved / "adapter_config.json").read_text())
        tensors = load_file(saved / "adapter_model.safetensors")
        for a_name in [name for name in tensors if name in places]:
            place = places[a_name]
            change = config["lora_alpha"] / config["r"] * (tensors[place.b_name].float() @ tensors[a_name].float())
            weight = torch.from_numpy(weights.rows(place.key, 0, place.shape.out_features))
            tensors[place.magnitude_name] = (weight + change).norm(dim=1)
        text = json.dumps({**config, "use_dora": True}).encode()
        packed.append(_pack(text, save(tensors), target, saved / "dora.safetensors", weights))
    return packed


def open_engine(
    base: Path, packed: list[PackedAdapter], dtype: str, threads: int
) -> AbstractContextManager[RunningEngine]:
    config = EngineConfig(
        model_dir=str(base), blob_url="", cache_dir="", dtype=dtype, pool_bytes=3 << 30, num_threads=threads
    )
    return start_engine(config, MemoryStager({one.digest: one for one in packed}))


def run_loramux(
    engine: RunningEngine, prompts: torch.Tensor, num_tokens: int, digests: Sequence[str] | None
) -> tuple[list[list[int]], float]:
    """Run all requests together with greedy decoding, and return each request's tokens and the total seconds."""
    started = time.perf_counter()
    answers = engine.answer(greedy_adds(prompts.tolist(), num_tokens, digests))
    return [answer.tokens for answer in answers.values()], time.perf_counter() - started


def check(
    base: Path, prompts: torch.Tensor, expected: list[list[int]], packed: list[PackedAdapter], threads: int
) -> None:
    """Raise CheckError unless loramux generates the expected tokens in float32."""
    digests = [one.digest for one in packed]
    with open_engine(base, packed, "float32", threads) as engine:
        engine.load(digests)
        found, _ = run_loramux(engine, prompts, NUM_CHECKED_TOKENS, digests)
    if found != expected:
        raise CheckError("loramux and peft disagree in float32")


def measure(arguments: argparse.Namespace, console: Console) -> tuple[list[Way], str]:
    shape = SHAPES[arguments.model]
    count, rank, threads = arguments.adapters, arguments.rank, arguments.threads
    scratch = SCRATCH / arguments.model
    base = scratch / "base"
    make_base(shape, base)
    torch.set_num_threads(threads)
    prompts = torch.randint(10, shape.vocab_size, (count, arguments.prompt), generator=torch.Generator().manual_seed(2))
    ways: dict[str, Way] = {}

    def record(name: str, seconds: float) -> None:
        way = ways.setdefault(name, Way(name, [], count * arguments.output))
        way.seconds.append(seconds)
        console.print(f"  {name}: {count * arguments.output / seconds:.1f} tokens/s")

    console.print("float32: compare the tokens of loramux and peft, then time peft")
    model = load_peft(base, count, rank, torch.float32)
    expected, _ = in_process.mixed_batch(model, prompts, NUM_CHECKED_TOKENS)
    check(base, prompts, expected, pack_adapters(model, base, scratch, count, "float32"), threads)
    check(base, prompts, expected, pack_with_magnitudes(base, scratch, count, "float32"), threads)
    console.print(f"  checked: {count} x {NUM_CHECKED_TOKENS} tokens are equal")
    if not arguments.skip_float32:
        # The check has already warmed up the model.
        record(
            "transformers static batch, base only, float32", in_process.base_only(model, prompts, arguments.output)[1]
        )
        record("peft mixed batch, float32", in_process.mixed_batch(model, prompts, arguments.output)[1])
    del model
    gc.collect()

    console.print("bfloat16")
    model = load_peft(base, count, rank, torch.bfloat16)
    packed = pack_adapters(model, base, scratch, count, "bfloat16")
    in_process.mixed_batch(model, prompts[:, :4], 2)
    record("transformers static batch, base only", in_process.base_only(model, prompts, arguments.output)[1])
    record("peft mixed batch", in_process.mixed_batch(model, prompts, arguments.output)[1])
    record("peft switching adapters", in_process.switching(model, prompts, arguments.output)[1])
    del model
    gc.collect()
    dora = pack_with_magnitudes(base, scratch, count, "bfloat16")
    kinds = {
        "loramux, base only": None,
        "loramux, distinct adapters": [one.digest for one in packed],
        "loramux, distinct DoRA adapters": [one.digest for one in dora],
        "loramux, one adapter": [packed[0].digest] * count,
    }
    with open_engine(base, [*packed, *dora], "bfloat16", threads) as engine:
        engine.load(one.digest for one in (*packed, *dora))
        for digests in list(kinds.values())[1:3]:
            run_loramux(engine, prompts, 4, digests)
        # Alternate, so that drift in the machine's speed affects all methods alike.
        for _ in range(arguments.repeats):
            for name, digests in kinds.items():
                record(name, run_loramux(engine, prompts, arguments.output, digests)[1])
    workload = (
        f"{arguments.model} ({shape.num_layers} layers, hidden {shape.hidden_size}), bfloat16: {count} requests with "
        f"{count} adapters of rank {rank} on all seven linears, prompt {arguments.prompt}, output {arguments.output}, "
        f"greedy, {threads} threads"
    )
    return list(ways.values()), workload


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("mixed_batch", __doc__)
    add = parser.add_argument
    add("--model", choices=sorted(SHAPES), default="1b")
    add("--adapters", type=int, default=16)
    add("--rank", type=int, default=16)
    add("--prompt", type=int, default=64)
    add("--output", type=int, default=32)
    add("--repeats", type=int, default=3, help="runs per loramux method; the median is reported")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--skip-float32", action="store_true", help="do not time peft in float32")
    add("--save", type=Path, dest="out", help="the same as --out")
    run = begin(parser.parse_args(argv))
    # peft uses names that are deprecated in transformers 5. Ignore the warnings.
    warnings.filterwarnings("ignore", category=FutureWarning)
    with in_process.quiet_transformers():
        ways, workload = measure(run.arguments, run.console)
    speed = {way.name: way.tokens_per_second for way in ways}
    ours, base = speed["loramux, distinct adapters"], speed["loramux, base only"]
    rows = [
        (name, f"{value:.1f}", f"{value / ours:.2f}") for name, value in sorted(speed.items(), key=lambda item: item[1])
    ]
    run.console.print(table(workload, ("way", "tokens/s", "relative to loramux with adapters"), rows))
    # On a CPU without bfloat16 arithmetic, peft and transformers are faster in float32, so use the better dtype.
    best_peft = max(value for name, value in speed.items() if name.startswith("peft"))
    best_static = max(value for name, value in speed.items() if name.startswith("transformers"))
    ratios = {
        "distinct adapters over the better peft way": ours / best_peft,
        "base only over transformers' better static batch": base / best_static,
        "time of distinct adapters over base only": base / ours,
        "time of distinct DoRA adapters over distinct adapters": ours / speed["loramux, distinct DoRA adapters"],
        "time of one adapter over base only": base / speed["loramux, one adapter"],
    }
    run.say({name: f"{value:.2f}" for name, value in ratios.items()})
    figures = {
        "workload": workload,
        "seconds": {way.name: [round(value, 3) for value in way.seconds] for way in ways},
        "tokens_per_second": {name: round(value, 2) for name, value in speed.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
    }
    run.write(figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
