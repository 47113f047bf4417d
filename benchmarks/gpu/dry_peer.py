"""Computes the memory and time that `peer` needs: loramux's from its own steps, and vLLM's from its settings."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu import peer as gpu_peer
from benchmarks.gpu.bench import CONTEXT_BYTES, Bench
from benchmarks.gpu.dry_engine import PlannedEngine
from benchmarks.gpu.model import model_of
from benchmarks.gpu.needs import CAPTURE_S, HOST_OP_S, HOST_STEP_S, Need, check, random_s
from benchmarks.gpu.random_models import ALL_MODULES, RandomAdapters
from benchmarks.gpu.step import NUM_MEASURED, NUM_WARM, PAGE_TOKENS, RANK, num_pages_of
from benchmarks.gpu.table_step import TableCase

ACTIVATION_BYTES = 4 * 10**9
"""Assumed memory of vLLM's activations and graphs, in bytes."""


def peer(bench: Bench) -> Iterator[Need]:
    model, plan = model_of(bench), gpu_peer.plan_of(bench)
    settings, adapters = gpu_peer.settings_of(bench, plan), RandomAdapters(bench, model, "bfloat16")
    adapter_pages = adapters.layout(RANK).num_pages
    engine = PlannedEngine(bench, model, settings, num_pages_of(settings, adapter_pages))
    start_s = engine.start_s + random_s(bench, engine.held["pool"])
    yield check()
    counts = (0, plan.num_adapters)
    cases = (
        (str(plan.decode), plan.decode.batch, plan.decode.context - 1, 1, NUM_WARM + NUM_MEASURED),
        (
            str(plan.prefill),
            plan.prefill.num_prompts,
            0,
            plan.prefill.num_tokens,
            gpu_peer.NUM_WARM_PREFILLS + gpu_peer.NUM_PREFILLS,
        ),
    )
    for name, num_sequences, context, num_queries, num_run in cases:
        steps = [
            engine.record(
                TableCase(name, num_sequences, context, num_queries, count, ALL_MODULES if count else (), RANK)
            )
            for count in counts
        ]
        operations = plan.prefill.operations(model, RANK) if num_queries > 1 else 0.0
        seconds = start_s + CAPTURE_S * len(counts) + HOST_STEP_S * plan.decode.num_skipped
        for one in steps:
            seconds += num_run * (max(one.seconds(bench, operations), HOST_OP_S * one.num_launches) + HOST_STEP_S)
        yield Need(
            f"loramux, {name}: base, {plan.num_adapters} adapters",
            steps[-1].shapes,
            len(counts),
            engine.held | {"activations": max(one.activations for one in steps)},
            seconds,
            frozenset[str]().union(*(one.programs for one in steps)),
            num_launches=sum(one.num_launches for one in steps),
        )
        start_s = 0.0
    itemsize = bench.dtype.itemsize
    cache_tokens = (plan.decode.batch + 1) * (settings["max_len"] + PAGE_TOKENS)
    for setting, limit_s in gpu_peer.VLLM_PROCESSES.items():
        has_lora = setting == "with LoRA"
        held = {
            "weights": model.all_bytes(itemsize),
            "K and V": cache_tokens * model.kv_bytes(itemsize),
            "adapters": plan.num_adapters * model.adapter_bytes(RANK, itemsize) if has_lora else 0,
            "activations": ACTIVATION_BYTES,
            "loramux's process": CONTEXT_BYTES,
        }
        # One row for the comparison of answers, and one for each time.
        num_kinds = 1 + has_lora
        yield Need(f"vLLM {setting}", {}, 3 * num_kinds, held, limit_s)
    yield engine.compiling()
