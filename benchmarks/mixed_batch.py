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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save

from benchmarks import peft_ways
from benchmarks.machine import add_allow_busy, busy_share, describe, require_idle
from benchmarks.random_model import SHAPES, load_peft, make_base
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.module_places import module_places
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.validation.validation import validate_files
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.assembly import AssembledEngine, assemble_engine
from loramux.engine.loop.config import EngineConfig, pack_target
from loramux.engine.protocol.messages import Add, Finished, Load, SamplingParams, StepOutput

FOLDER = Path(__file__).parent
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
    target = pack_target(ModelConfig.load(base), dtype)
    packed = []
    for index in range(num_adapters):
        tensors = directory / f"a{index}" / "adapter_model.safetensors"
        report = validate_files((tensors.parent / "adapter_config.json").read_bytes(), tensors, target)
        canonical = tensors.parent / "canonical.safetensors"
        write_canonical(tensors, report.scales, canonical)
        packed.append(pack(canonical, target))
    return packed


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
        data = save(tensors)
        report = validate_files(text, data, target)
        write_canonical(data, report.scales, saved / "dora.safetensors")
        packed.append(pack(saved / "dora.safetensors", target, weights))
    return packed


def assemble(base: Path, packed: list[PackedAdapter], dtype: str, threads: int) -> AssembledEngine:
    config = EngineConfig(
        model_dir=str(base), blob_url="", cache_dir="", dtype=dtype, pool_bytes=3 << 30, num_threads=threads
    )
    assembled = assemble_engine(config, lambda: None, MemoryStager({one.digest: one for one in packed}))
    for one in packed:
        assembled.engine.load(b"", Load(call_id=one.digest, digest=one.digest))
    while assembled.engine.has_work:
        assembled.engine.step()
    return assembled


def run_loramux(
    assembled: AssembledEngine, prompts: torch.Tensor, num_tokens: int, digests: list[str | None]
) -> tuple[list[list[int]], float]:
    """Run all requests together with greedy decoding, and return each request's tokens and the total seconds."""
    engine = assembled.engine
    engine.take_outbox()
    answers: list[list[int]] = [[] for _ in prompts]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    for row, prompt in enumerate(prompts.tolist()):
        add = Add(
            sequence_id=str(row), prompt=tuple(prompt), max_tokens=num_tokens, sampling=sampling, digest=digests[row]
        )
        engine.add(b"", add)
    while engine.has_work:
        engine.step()
        for outbound in engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        answers[int(output.sequence_id)].extend(output.token_ids)
                case Finished(reason=reason):
                    assert reason == "length", outbound.message
    return answers, time.perf_counter() - started


def check(
    base: Path, prompts: torch.Tensor, expected: list[list[int]], packed: list[PackedAdapter], threads: int
) -> None:
    """Exit unless loramux generates the expected tokens in float32."""
    assembled = assemble(base, packed, "float32", threads)
    found, _ = run_loramux(assembled, prompts, NUM_CHECKED_TOKENS, [one.digest for one in packed])
    assembled.adapters.close()
    if found != expected:
        raise SystemExit("loramux and peft disagree in float32: nothing was measured")


def measure(arguments: argparse.Namespace, console: Console) -> tuple[list[Way], str]:
    shape = SHAPES[arguments.model]
    count, rank, threads = arguments.adapters, arguments.rank, arguments.threads
    scratch = FOLDER / "scratch" / arguments.model
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
    expected, _ = peft_ways.mixed_batch(model, prompts, NUM_CHECKED_TOKENS)
    check(base, prompts, expected, pack_adapters(model, base, scratch, count, "float32"), threads)
    check(base, prompts, expected, pack_with_magnitudes(base, scratch, count, "float32"), threads)
    console.print(f"  checked: {count} x {NUM_CHECKED_TOKENS} tokens are equal")
    if not arguments.skip_float32:
        # The check has already warmed up the model.
        record(
            "transformers static batch, base only, float32", peft_ways.base_only(model, prompts, arguments.output)[1]
        )
        record("peft mixed batch, float32", peft_ways.mixed_batch(model, prompts, arguments.output)[1])
    del model
    gc.collect()

    console.print("bfloat16")
    model = load_peft(base, count, rank, torch.bfloat16)
    packed = pack_adapters(model, base, scratch, count, "bfloat16")
    peft_ways.mixed_batch(model, prompts[:, :4], 2)
    record("transformers static batch, base only", peft_ways.base_only(model, prompts, arguments.output)[1])
    record("peft mixed batch", peft_ways.mixed_batch(model, prompts, arguments.output)[1])
    record("peft switching adapters", peft_ways.switching(model, prompts, arguments.output)[1])
    del model
    gc.collect()
    dora = pack_with_magnitudes(base, scratch, count, "bfloat16")
    assembled = assemble(base, [*packed, *dora], "bfloat16", threads)
    digests: list[str | None] = [one.digest for one in packed]
    dora_digests: list[str | None] = [one.digest for one in dora]
    for warm_up in (digests, dora_digests):
        run_loramux(assembled, prompts, 4, warm_up)
    # Alternate, so that drift in the machine's speed affects all methods alike.
    for _ in range(arguments.repeats):
        record("loramux, base only", run_loramux(assembled, prompts, arguments.output, [None] * count)[1])
        record("loramux, distinct adapters", run_loramux(assembled, prompts, arguments.output, digests)[1])
        record("loramux, distinct DoRA adapters", run_loramux(assembled, prompts, arguments.output, dora_digests)[1])
        record("loramux, one adapter", run_loramux(assembled, prompts, arguments.output, digests[:1] * count)[1])
    assembled.adapters.close()
    workload = (
        f"{arguments.model} ({shape.num_layers} layers, hidden {shape.hidden_size}), bfloat16: {count} requests with "
        f"{count} adapters of rank {rank} on all seven linears, prompt {arguments.prompt}, output {arguments.output}, "
        f"greedy, {threads} threads"
    )
    return list(ways.values()), workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3, help="runs per loramux method; the median is reported")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--skip-float32", action="store_true", help="do not time peft in float32")
    add_allow_busy(parser)
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    # peft uses names that are deprecated in transformers 5. Ignore the warnings.
    warnings.filterwarnings("ignore", category=FutureWarning)
    console = Console()
    machine = describe()
    busy_before = require_idle(arguments.allow_busy)
    with peft_ways.quiet_transformers():
        ways, workload = measure(arguments, console)
    speed = {way.name: way.tokens_per_second for way in ways}
    table = Table(title=workload)
    for heading in ("way", "tokens/s", "relative to loramux with adapters"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    ours = speed["loramux, distinct adapters"]
    for name, value in sorted(speed.items(), key=lambda item: item[1]):
        table.add_row(name, f"{value:.1f}", f"{value / ours:.2f}")
    console.print(table)
    # On a CPU without bfloat16 arithmetic, peft and transformers are faster in float32, so use the better dtype.
    best_peft = max(value for name, value in speed.items() if name.startswith("peft"))
    best_static = max(value for name, value in speed.items() if name.startswith("transformers"))
    base = speed["loramux, base only"]
    ratios = {
        "distinct adapters over the better peft way": ours / best_peft,
        "base only over transformers' better static batch": base / best_static,
        "time of distinct adapters over base only": base / ours,
        "time of distinct DoRA adapters over distinct adapters": ours / speed["loramux, distinct DoRA adapters"],
        "time of one adapter over base only": base / speed["loramux, one adapter"],
    }
    for name, value in ratios.items():
        console.print(f"{name}: {value:.2f}")
    for name, value in machine.items():
        console.print(f"[dim]{name}: {value}[/dim]")
    if arguments.save:
        document = {
            "date": datetime.now(UTC).date().isoformat(),
            "workload": workload,
            "machine": machine,
            "busy_share": {"before": round(busy_before, 3), "after": round(busy_share(), 3)},
            "seconds": {way.name: [round(value, 3) for value in way.seconds] for way in ways},
            "tokens_per_second": {name: round(value, 2) for name, value in speed.items()},
            "ratios": {name: round(value, 3) for name, value in ratios.items()},
        }
        arguments.save.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
