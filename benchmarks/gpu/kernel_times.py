"""Lists the kernels of whole steps with their times, from torch's profiler, to show where a step's time goes.

`PYTHONPATH=.src python -m benchmarks.gpu.kernel_times --out FILE.json` traces decode steps of Llama-3.1-8B with and
without adapters, and a prefill. `--model qwen3-30b-a3b` traces a mixture, with adapters on attention, and `--model
qwen3.5-9b` a hybrid decoder. `--long` traces contexts of 8,192 and 32,768 tokens instead. `--dry-run h100` lists what
the traces need on a card, without a GPU.

A profiled step is slower than an unprofiled one, so only shares and single kernels count; the `step` and `prefill`
parts of the benchmark measure whole steps. Kernels of one step that overlap are counted in full, and `busy_us` is the
time in which at least one of them runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import prefill as gpu_prefill
from benchmarks.gpu import step as gpu_step
from benchmarks.gpu.bench import POOL_STD, Bench
from benchmarks.gpu.cards import PLANNED
from benchmarks.gpu.engine import ObservedEngine, engine_dtype, open_engine
from benchmarks.gpu.machine import describe
from benchmarks.gpu.model import LLAMA_8B, QWEN3_5_9B, QWEN3_30B_A3B, TINY, TINY_EXPERTS, TINY_HYBRID, Model
from benchmarks.gpu.prefill import PrefillCase
from benchmarks.gpu.random_models import ALL_MODULES, HYBRID_MODULES, RandomAdapters, model_config, random_prompt
from benchmarks.gpu.step import StepCase
from benchmarks.machine import out_file
from benchmarks.running_engine import greedy_adds
from loramux.engine.execution.step_shape import MAX_GRAPH_TOKENS

NUM_TRACED = 10
MAX_ADAPTERS = 64
PREFILL_COUNTS = (0, 1)
MAX_PREFILL_TOKENS = 8192
"""Most tokens of one step of a prefill. Longer prompts take several steps, as in a server."""

NAME_LENGTH = 90
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that run on the device."""


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy on the device. Times are in microseconds."""

    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Traced:
    """A model whose steps are traced, the tiny one with which a run is rehearsed, and the modules of its adapters."""

    model: Model
    tiny: Model
    modules: tuple[int, ...]

    def of(self, bench: Bench) -> Model:
        return self.tiny if bench.is_tiny else self.model


ATTENTION_MODULES = (0, 1, 2, 3)
MODELS = {
    "llama-3.1-8b": Traced(LLAMA_8B, TINY, ALL_MODULES),
    "qwen3-30b-a3b": Traced(QWEN3_30B_A3B, TINY_EXPERTS, ATTENTION_MODULES),
    "qwen3.5-9b": Traced(QWEN3_5_9B, TINY_HYBRID, HYBRID_MODULES),
}


@dataclass(frozen=True, slots=True)
class Contexts:
    """The steps to trace: decodes with numbers of adapters, and prefills. Each group of decodes has its own engine."""

    decodes: tuple[tuple[tuple[StepCase, tuple[int, ...]], ...], ...]
    prefills: tuple[PrefillCase, ...]


USUAL = Contexts((((StepCase(64, 1024), (0, 16, 64)), (StepCase(1, 1024), (0, 1))),), (PrefillCase(1, 2048),))
LONG = Contexts(
    (((StepCase(32, 8192), (0, 16)),), ((StepCase(8, 32768), (0, 8)),)),
    (PrefillCase(1, 8192), PrefillCase(1, 32768)),
)
TINY_USUAL = Contexts((((StepCase(2, 16), (0, 2)),),), (PrefillCase(1, 40),))
TINY_LONG = Contexts((((StepCase(2, 32), (0, 2)),),), (PrefillCase(1, 64), PrefillCase(1, 96)))


def contexts_of(is_tiny: bool, is_long: bool) -> Contexts:
    if is_tiny:
        return TINY_LONG if is_long else TINY_USUAL
    return LONG if is_long else USUAL


def decode_settings(bench: Bench, decodes: tuple[tuple[StepCase, tuple[int, ...]], ...]) -> dict[str, Any]:
    """The engine's settings for a group of decodes."""
    return gpu_step.settings_of(bench, [case for case, _ in decodes]) | {"max_resident_adapters": MAX_ADAPTERS}


def prefill_settings(case: PrefillCase) -> dict[str, Any]:
    """The engine's settings for a prefill."""
    return gpu_prefill.settings_of([case]) | {"max_batch_tokens": min(case.num_tokens, MAX_PREFILL_TOKENS)}


def spans_of(run: Callable[[], object]) -> list[Span]:
    """Run `run` under the profiler, and return what the device did, in order."""
    # A rehearsal without a GPU traces what the host does, so that the trace is written and read.
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [
        Span(one["name"], one["ts"], one["ts"] + one["dur"]) for one in events if one.get("cat") in DEVICE_CATEGORIES
    ]
    return sorted(found, key=lambda span: span.begin_us)


def summary(spans: Sequence[Span], num_steps: int) -> dict[str, Any]:
    """Times of one step in microseconds: from the first kernel to the last, in which one runs, and by kernel."""
    busy, until = 0.0, 0.0
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        busy += max(0.0, span.end_us - max(until, span.begin_us))
        until = max(until, span.end_us)
        by_name[span.name[:NAME_LENGTH]].append(span.end_us - span.begin_us)
    kernels = {
        name: {"us": round(sum(times) / num_steps, 1), "launches": round(len(times) / num_steps, 2)}
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))
    }
    whole = until - spans[0].begin_us if spans else 0.0
    return {"step_us": round(whole / num_steps, 1), "busy_us": round(busy / num_steps, 1), "kernels": kernels}


def decodes(bench: Bench, traced: Traced, contexts: Contexts) -> Iterator[tuple[str, dict[str, Any]]]:
    for group in contexts.decodes:
        yield from _decodes(bench, traced, group)


def _decodes(
    bench: Bench, traced: Traced, group: tuple[tuple[StepCase, tuple[int, ...]], ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    model, settings = traced.of(bench), decode_settings(bench, group)
    adapters = RandomAdapters(bench, model, engine_dtype(bench))
    digests = adapters.make([f"a{index}" for index in range(MAX_ADAPTERS)], gpu_step.RANK, traced.modules)
    pool_bytes = gpu_step.num_pages_of(settings, adapters.num_pages(digests[0])) * adapters.page_bytes
    with open_engine(bench, model, adapters, pool_bytes=pool_bytes, **settings) as engine:
        for part in engine.assembled.views.kv.view(-1).split(1 << 29):
            part.normal_(0.0, POOL_STD)
        for case, counts in group:
            for count in counts:
                gpu_step.start_decoding(bench, engine, case, digests[:count])
                spans = spans_of(lambda: [engine.step() for _ in range(NUM_TRACED)])
                engine.abort()
                yield f"{case}, {count} adapters", summary(spans, NUM_TRACED)


def prefills(bench: Bench, traced: Traced, contexts: Contexts) -> Iterator[tuple[str, dict[str, Any]]]:
    for case in contexts.prefills:
        yield from _prefills(bench, traced, case)


def _prefills(bench: Bench, traced: Traced, case: PrefillCase) -> Iterator[tuple[str, dict[str, Any]]]:
    model = traced.of(bench)
    adapters = RandomAdapters(bench, model, engine_dtype(bench))
    digests = adapters.make(["a0"], gpu_prefill.RANK, traced.modules)
    num_pages = prefill_pages(bench, model, case, adapters.num_pages(digests[0]))
    settings = prefill_settings(case)
    with open_engine(bench, model, adapters, pool_bytes=num_pages * adapters.page_bytes, **settings) as engine:
        engine.load(digests)
        for count in PREFILL_COUNTS:
            for _ in range(1 if bench.is_tiny else prefill_warm_runs(case)):
                _prefill(model, engine, case, digests[:count])
            spans = spans_of(partial(_prefill, model, engine, case, digests[:count]))
            yield f"{case}, {count} adapters", summary(spans, 1)


def prefill_warm_runs(case: PrefillCase) -> int:
    """Number of untraced runs. Long prompts are not captured as graphs."""
    return gpu_prefill.NUM_WARM if case.num_tokens <= MAX_GRAPH_TOKENS else 2


def prefill_pages(bench: Bench, model: Model, case: PrefillCase, adapter_pages: int) -> int:
    """Number of pages of a prefill's pool. A hybrid decoder also keeps a state, here and in the prefix cache."""
    config = model_config(model, case.num_tokens)
    itemsize = bench.dtype.itemsize if not bench.is_tiny else 4
    states = 0 if config.delta is None else config.num_state_pages(config.geometry(itemsize, itemsize))
    return gpu_prefill.num_pages_of([case], adapter_pages) + 4 * states


def _prefill(model: Model, engine: ObservedEngine, case: PrefillCase, digests: list[str]) -> None:
    engine.answer(greedy_adds([random_prompt(model, case.num_tokens, 0)], 1, digests))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.kernel_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", choices=MODELS, default="llama-3.1-8b", help="model with random weights (%(default)s)"
    )
    parser.add_argument("--long", action="store_true", help="trace contexts of 8,192 and 32,768 tokens instead")
    parser.add_argument("--dry-run", choices=PLANNED, metavar="CARD", help="list memory and time on this card instead")
    parser.add_argument("--out", type=out_file, help="write the figures to this JSON file")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="rehearse on a small model in Triton's interpreter, with TRITON_INTERPRET=1; the times are 0",
    )
    arguments = parser.parse_args()
    traced, contexts = MODELS[arguments.model], contexts_of(arguments.tiny, arguments.long)
    if arguments.dry_run:
        # It imports this module.
        from benchmarks.gpu.dry_trace import list_needs

        return list_needs(traced, contexts, PLANNED[arguments.dry_run])
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if arguments.tiny != is_interpreted:
        print("--tiny and TRITON_INTERPRET=1 go together", file=sys.stderr)
        return 2
    if not arguments.tiny and not torch.cuda.is_available():
        print("there is no CUDA device here; TRITON_INTERPRET=1 with --tiny needs none", file=sys.stderr)
        return 2
    device = torch.device("cpu" if arguments.tiny else "cuda")
    bench = Bench(device, arguments.tiny, False, False, True, False, Path())
    document: dict[str, Any] = {"machine": describe(), "model": arguments.model, "steps": {}}
    with torch.inference_mode():
        for part in (decodes, prefills):
            for name, found in part(bench, traced, contexts):
                document["steps"][name] = found
                print(f"{name}: {found['step_us']} us, {found['busy_us']} us busy", flush=True)
                for kernel, one in list(found["kernels"].items())[:12]:
                    print(f"  {one['us']:9.1f} us  {one['launches']:7.2f} x  {kernel}", flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
