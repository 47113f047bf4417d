"""Lists the kernels of whole steps with their times, from torch's profiler, to show where a step's time goes.

`PYTHONPATH=.src python -m benchmarks.gpu.kernel_times --out FILE.json` traces decode steps of Llama-3.1-8B with and
without adapters, and a prefill. `--model qwen3-30b-a3b` traces a mixture, with adapters on attention. A profiled step
is slower than an unprofiled one, so only shares and single kernels count; the `step` and `prefill` parts of the
benchmark measure whole steps. Kernels of one step that overlap are counted in full, and `busy_us` is the time in which
at least one of them runs.
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
from benchmarks.gpu.engine import ObservedEngine, engine_dtype, open_engine
from benchmarks.gpu.machine import describe
from benchmarks.gpu.model import LLAMA_8B, QWEN3_30B_A3B, TINY, TINY_EXPERTS, Model
from benchmarks.gpu.prefill import PrefillCase
from benchmarks.gpu.random_models import ALL_MODULES, RandomAdapters, random_prompt
from benchmarks.gpu.step import StepCase
from benchmarks.harness import out_file
from benchmarks.running_engine import greedy_adds

NUM_TRACED = 10
DECODES = ((StepCase(64, 1024), (0, 16, 64)), (StepCase(1, 1024), (0, 1)))
PREFILL, PREFILL_COUNTS = PrefillCase(1, 2048), (0, 1)
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
}


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


def decodes(bench: Bench, traced: Traced) -> Iterator[tuple[str, dict[str, Any]]]:
    planned = ((StepCase(2, 16), (0, 2)),) if bench.is_tiny else DECODES
    model, wanted = traced.of(bench), [case for case, _ in planned]
    settings = gpu_step.settings_of(bench, wanted) | {"max_resident_adapters": 64}
    adapters = RandomAdapters(bench, model, engine_dtype(bench))
    digests = adapters.make([f"a{index}" for index in range(64)], gpu_step.RANK, traced.modules)
    pool_bytes = gpu_step.num_pages_of(settings, adapters.num_pages(digests[0])) * adapters.page_bytes
    with open_engine(bench, model, adapters, pool_bytes=pool_bytes, **settings) as engine:
        for part in engine.assembled.views.kv.view(-1).split(1 << 29):
            part.normal_(0.0, POOL_STD)
        for case, counts in planned:
            for count in counts:
                gpu_step.start_decoding(bench, engine, case, digests[:count])
                spans = spans_of(lambda: [engine.step() for _ in range(NUM_TRACED)])
                engine.abort()
                yield f"{case}, {count} adapters", summary(spans, NUM_TRACED)


def prefills(bench: Bench, traced: Traced) -> Iterator[tuple[str, dict[str, Any]]]:
    model, case = traced.of(bench), PrefillCase(1, 40) if bench.is_tiny else PREFILL
    adapters = RandomAdapters(bench, model, engine_dtype(bench))
    digests = adapters.make(["a0"], gpu_prefill.RANK, traced.modules)
    num_pages = gpu_prefill.num_pages_of([case], adapters.num_pages(digests[0]))
    settings = gpu_prefill.settings_of([case])
    with open_engine(bench, model, adapters, pool_bytes=num_pages * adapters.page_bytes, **settings) as engine:
        engine.load(digests)
        for count in PREFILL_COUNTS:
            for _ in range(gpu_prefill.NUM_WARM):
                _prefill(model, engine, case, digests[:count])
            spans = spans_of(partial(_prefill, model, engine, case, digests[:count]))
            yield f"{case}, {count} adapters", summary(spans, 1)


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
    parser.add_argument("--out", type=out_file, help="write the figures to this JSON file")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="rehearse on a small model in Triton's interpreter, with TRITON_INTERPRET=1; the times are 0",
    )
    arguments = parser.parse_args()
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
            for name, found in part(bench, MODELS[arguments.model]):
                document["steps"][name] = found
                print(f"{name}: {found['step_us']} us, {found['busy_us']} us busy", flush=True)
                for kernel, one in list(found["kernels"].items())[:12]:
                    print(f"  {one['us']:9.1f} us  {one['launches']:7.2f} x  {kernel}", flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
