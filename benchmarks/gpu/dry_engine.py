"""Computes the memory and time that `step`, `prefill` and `s_lora` need, from the engine's own steps and settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.gpu import fused as gpu_fused
from benchmarks.gpu import prefill as gpu_prefill
from benchmarks.gpu import s_lora as gpu_s_lora
from benchmarks.gpu import step as gpu_step
from benchmarks.gpu.bench import CONTEXT_BYTES, Bench
from benchmarks.gpu.code_formats import FORMATS
from benchmarks.gpu.model import Model, model_of
from benchmarks.gpu.needs import (
    CAPTURE_S,
    ENGINE_S,
    HOST_OP_S,
    HOST_STEP_S,
    NUM_SHAPES,
    OVER_FLOOR,
    Listed,
    MetaMemory,
    Need,
    check,
    compiling,
    floor_s,
    planned,
    random_s,
    shape_of,
)
from benchmarks.gpu.random_models import ALL_MODULES, RandomAdapters
from benchmarks.gpu.table_bytes import bytes_of
from benchmarks.gpu.table_step import Launch, MetaEngine, RecordedStep, TableCase

PDL_KERNELS = ("shrink_kernel", "expand_kernel", "_norm", "_gate", "_rotate_and_store", "_attend")
"""Kernels that have other programs if launches do not overlap."""


class PlannedEngine:
    """An engine over meta tensors, and the bytes that it would take on a card."""

    def __init__(self, bench: Bench, model: Model, settings: dict[str, Any], num_pages: int, form: str = "") -> None:
        """`form` is the format of the layers' weights, or empty for bfloat16."""
        card = planned(bench).card
        self.bench, self.model, self.memory = bench, model, MetaMemory()
        self.num_pages, self.most_activations = num_pages, 0
        with self.memory:
            whole = MetaEngine(model, card, num_pages=num_pages, form=FORMATS.get(form), **settings)
            pool = whole.pool.raw
            rest = self.memory.restart() - pool.nbytes
            # Layers share quantised weights of the same shape. The float head and embedding stay.
            weights = model.all_bytes(bench.dtype.itemsize) if not form else rest
            self.held = {"weights": weights, "pool": pool.nbytes, "tables": rest - weights}
        self.shapes = {"a page": shape_of(pool[0]), "page table": shape_of(whole.tables.device.page_table)}
        # All layers are alike, so steps of engines with one and two layers are extrapolated to all layers.
        self._few = [
            MetaEngine(replace(model, num_layers=count), card, num_pages=num_pages, form=FORMATS.get(form), **settings)
            for count in (1, 2)
        ]
        # Float weights are drawn even if codes replace them.
        self.start_s = ENGINE_S + random_s(bench, model.all_bytes(bench.dtype.itemsize))

    def record(self, case: TableCase) -> PlannedStep:
        one, found = PlannedStep(case.num_tokens), PlannedStep(case.num_tokens)
        self._few[0].record(case, one.note_step)
        with self.memory:
            before = self.memory.restart()
            self._few[1].record(case, found.note_step)
        found.activations = self.memory.peak - before
        further = self.model.num_layers - 2
        found.num_launches += further * (found.num_launches - one.num_launches)
        found.moved += further * (found.moved - one.moved)
        self.most_activations = max(self.most_activations, found.activations)
        return found

    def compiling(self) -> Need:
        """Return the memory that the compiling processes need.

        Each process holds a CUDA context, the embedding and head, one linear layer of each size, and the largest step's
        activations.
        """
        itemsize = self.bench.dtype.itemsize
        ends = 2 * self.model.vocab_size * self.model.hidden_size * itemsize
        each = CONTEXT_BYTES + ends + self.model.linear_elements * itemsize + self.held["tables"]
        return compiling(each + self.most_activations)


class PlannedStep(Listed):
    """A step's launches, the fewest bytes that it moves, and its peak memory in addition to the engine's."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens, self.moved, self.activations = num_tokens, 0.0, 0

    def note_step(self, launch: Launch, step: RecordedStep) -> None:
        self.note(launch)
        self.moved += bytes_of(launch, step).least

    def seconds(self, bench: Bench, operations: float = 0.0) -> float:
        return OVER_FLOOR * floor_s(bench, self.moved, operations, self.num_launches)

    @property
    def shapes(self) -> dict[str, str]:
        return {"tokens": str(self.num_tokens), "widest grid": self.widest}


def step(bench: Bench) -> Iterator[Need]:
    yield from _decodes(bench, gpu_step.cases(bench), fuses=False)


def fused(bench: Bench) -> Iterator[Need]:
    yield from _decodes(bench, gpu_fused.cases(bench), fuses=True)


def _decodes(bench: Bench, wanted: list[gpu_step.StepCase], fuses: bool) -> Iterator[Need]:
    model = model_of(bench)
    settings = gpu_step.settings_of(bench, wanted)
    adapter_pages = RandomAdapters(bench, model, "bfloat16").layout(gpu_step.RANK).num_pages
    engine = PlannedEngine(bench, model, settings, gpu_step.num_pages_of(settings, adapter_pages))
    start_s = engine.start_s + random_s(bench, engine.held["pool"])
    yield check()
    # The single row reports the check that adapters change the full-size model's answers.
    yield Need("every case", engine.shapes | {"pages": str(engine.num_pages)}, 1, engine.held, start_s)
    needs = [_step_case(bench, engine, case, fuses) for case in wanted]
    yield from needs
    if bench.has_pdl and not fuses:
        # The first case runs again on another engine, without overlapping launches and with a pool that is no larger.
        again = needs[0]
        programs = frozenset(f"no pdl {one}" for one in again.programs if one.startswith(PDL_KERNELS))
        yield replace(again, case=f"{again.case}, no pdl", seconds=start_s + again.seconds, programs=programs)
    yield engine.compiling()


def _step_case(bench: Bench, engine: PlannedEngine, case: gpu_step.StepCase, fuses: bool) -> Need:
    counts = (0, *gpu_step.adapter_counts(bench, case))
    num_skipped, num_run = case.num_skipped + 2, gpu_step.NUM_WARM + gpu_step.NUM_MEASURED
    steps = [
        engine.record(
            TableCase(
                str(case),
                case.batch,
                case.context - 1,
                1,
                count,
                ALL_MODULES if count else (),
                gpu_step.RANK,
                fuses=fuses,
            )
        )
        for count in counts
    ]
    seconds = sum(num_run * one.seconds(bench) + CAPTURE_S for one in steps)
    # Each step is submitted once before capture and once during it. Skipped steps take only host time.
    seconds += sum(2 * HOST_OP_S * one.num_launches + HOST_STEP_S * num_skipped for one in steps)
    held = engine.held | {"activations": sum(one.activations for one in steps)}
    programs = frozenset[str]().union(*(one.programs for one in steps))
    name = f"{case}: base, {', '.join(map(str, counts[1:]))} adapters"
    num_launches = sum(one.num_launches for one in steps)
    return Need(name, steps[-1].shapes, len(counts), held, seconds, programs, num_launches=num_launches)


def prefill(bench: Bench) -> Iterator[Need]:
    model = model_of(bench)
    adapter_pages = RandomAdapters(bench, model, "bfloat16").layout(gpu_prefill.RANK).num_pages
    yield check()
    for form, wanted in gpu_prefill.by_form(gpu_prefill.cases(bench)):
        settings = gpu_prefill.settings_of(wanted)
        engine = PlannedEngine(bench, model, settings, gpu_prefill.num_pages_of(wanted, adapter_pages), form)
        name = f"every case with weights in {form}" if form else "every case"
        yield Need(name, engine.shapes | {"pages": str(engine.num_pages)}, 0, engine.held, engine.start_s)
        yield from _prefills(bench, engine, wanted)
        if not form:
            yield engine.compiling()


def _prefills(bench: Bench, engine: PlannedEngine, wanted: list[gpu_prefill.PrefillCase]) -> Iterator[Need]:
    model = engine.model
    for case in wanted:
        counts = (0, case.num_prompts)
        steps = [
            engine.record(
                TableCase(str(case), case.num_prompts, 0, case.num_tokens, count, ALL_MODULES if count else (),
                          gpu_prefill.RANK)
            )
            for count in counts
        ]  # fmt: skip
        seconds = 2 * CAPTURE_S
        for count, one in zip(counts, steps, strict=True):
            operations = case.operations(model, gpu_prefill.RANK if count else 0)
            # Steps of this size are submitted launch by launch, in parallel with the card's work.
            run = max(one.seconds(bench, operations), HOST_OP_S * one.num_launches)
            seconds += (gpu_prefill.NUM_WARM + gpu_prefill.NUM_MEASURED) * (run + HOST_STEP_S)
        held = engine.held | {"activations": max(one.activations for one in steps)}
        programs = frozenset[str]().union(*(one.programs for one in steps))
        yield Need(
            f"{case}: base, {counts[1]} adapters",
            steps[-1].shapes,
            len(counts),
            held,
            seconds,
            programs,
            num_launches=sum(one.num_launches for one in steps),
        )


def s_lora(bench: Bench, adapter_dtype: gpu_s_lora.AdapterDtype = None) -> Iterator[Need]:
    model, workload = gpu_s_lora.model_of(bench), gpu_s_lora.workload_of(bench)
    settings = gpu_s_lora.settings_of(workload, adapter_dtype)
    adapters = RandomAdapters(bench, model, "bfloat16", adapter_dtype)
    yield check()
    # One row describes the workload.
    yield Need("every case", {"workload": str(workload)}, 1, {}, 0.0)
    num_steps, num_prompt_tokens = scheduled_steps(workload)
    most = max(workload.num_adapters)
    whole = gpu_s_lora.whole_pool_bytes(bench) // adapters.page_bytes
    engine = PlannedEngine(bench, model, settings, whole)
    for name in gpu_s_lora.settings_to_run(bench, adapter_dtype):
        turns = gpu_s_lora.SETTINGS[name]
        pages = [adapters.layout(rank, gpu_s_lora.ATTENTION_MODULES).num_pages for rank in turns]
        capped = workload.kv_pages + sum(pages[number % len(turns)] for number in range(gpu_s_lora.CAPPED_ADAPTERS))
        payload = sum(pages) * adapters.page_bytes
        compiled = frozenset[str]()
        for step in gpu_s_lora.steps_to_warm(workload, name):
            case = TableCase(name, step.num_sequences, 0, step.num_rows, 1, gpu_s_lora.ATTENTION_MODULES, step.rank)
            compiled |= engine.record(case).programs
        # Estimate every step with all sequences at their mean full length, each with its own adapter if there are
        # enough.
        context, count = workload.shortest + workload.longest, min(most, workload.max_sequences)
        full = engine.record(
            TableCase(name, workload.max_sequences, context - 1, 1, count, gpu_s_lora.ATTENTION_MODULES, max(turns))
        )
        prompts = 2 * num_prompt_tokens * model.num_layers * model.linear_elements
        run = num_steps * full.seconds(bench) + OVER_FLOOR * floor_s(bench, operations=prompts)
        for way, num_pages, counts in (("whole pool", whole, workload.num_adapters), ("capped pool", capped, (most,))):
            problem = f"{num_pages} pages, but the sequences alone need {workload.kv_pages}"
            # Count one run without timing in addition to the measured runs. Payloads are generated on the card and
            # pinned in host memory.
            seconds = engine.start_s + (len(counts) + 1) * run + random_s(bench, payload) + _captures_s(full)
            pool = num_pages * adapters.page_bytes
            yield Need(
                f"{name}, {way}: {', '.join(map(str, counts))} adapters",
                engine.shapes | {"pages": str(num_pages)},
                len(counts),
                engine.held | {"pool": pool, "activations": 2 * full.activations},
                seconds,
                compiled | full.programs,
                problem if num_pages < workload.kv_pages else "",
                full.num_launches,
            )
    yield engine.compiling()


def s_lora_fp8(bench: Bench) -> Iterator[Need]:
    yield from s_lora(bench, "fp8")


def _captures_s(full: PlannedStep) -> float:
    """Seconds to run and capture steps of all sizes that occur while the batch fills and empties."""
    return NUM_SHAPES * (CAPTURE_S + 2 * HOST_OP_S * full.num_launches)


def scheduled_steps(workload: gpu_s_lora.Workload) -> tuple[int, int]:
    """Number of steps until enough requests are answered, and number of prompt tokens in these steps.

    As in the engine's scheduler, decodes come first in each step, and prompts fill the rest.
    """
    waiting = deque((one.num_prompt, one.num_output) for one in gpu_s_lora.drawn_of(workload))
    decoding: list[int] = []
    left, num_output = 0, 0
    num_steps = num_prompt_tokens = num_answered = 0
    while num_answered < workload.num_answered:
        num_steps += 1
        room = workload.max_batch_tokens - len(decoding)
        decoding = [one - 1 for one in decoding]
        while room and (left or (waiting and len(decoding) < workload.max_sequences)):
            if not left:
                left, num_output = waiting.popleft()
            taken = min(left, room)
            left, room, num_prompt_tokens = left - taken, room - taken, num_prompt_tokens + taken
            if not left:
                decoding.append(num_output - 1)
        num_answered += sum(one <= 0 for one in decoding)
        decoding = [one for one in decoding if one > 0]
    return num_steps, num_prompt_tokens
