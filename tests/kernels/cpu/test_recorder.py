"""Programs, compared with calls of the same kernels. The results are bitwise equal."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from loramux.kernels.composed_linear import JoinedLinear, ReorderedLinear
from loramux.kernels.cpu.instructions import amx
from loramux.kernels.cpu.instructions.compiled import helper, intrinsic
from loramux.kernels.cpu.instructions.threads import set_num_threads
from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.cpu.linear import linear as cpu_linear
from loramux.kernels.cpu.linear import quantized_linear
from loramux.kernels.cpu.linear.linear import PackedLinear
from loramux.kernels.cpu.linear.quantized_amx import has_integer_tiles
from loramux.kernels.cpu.linear.quantized_linear import make_quantized_linear
from loramux.kernels.cpu.programs.program import SERIAL_WORK
from loramux.kernels.cpu.recorder import _OnlyViews, start_recording
from loramux.kernels.dispatch import Kernels
from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.kernels.recording import NotRecordable
from loramux.kernels.routing_spec import RoutingSpec
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AttentionBatch, AttentionSpec, LoraCall, ModuleGroup, PoolViews
from tests.kernels.cpu.codebooks import CODEBOOKS, random_weight
from tests.kernels.cpu.instruction_sets import runs_here
from tests.kernels.pools import AdapterPool, adapter_pool

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 6, 2, 16, 96, 160
MODULES = [LinearShape("q", HIDDEN, HEADS * HEAD_DIM), LinearShape("v", HIDDEN, KV_HEADS * HEAD_DIM)]
GROUP = ModuleGroup((0, 1), HIDDEN, (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), (0, (HEADS + KV_HEADS) * HEAD_DIM))
RANKS = np.array([[[3, 5]], [[0, 16]], [[4, 1]]], np.int32)
SPECS = {
    "plain": AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, 0.25),
    "window and cap": AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, 0.25, sliding_window=9, soft_cap=2.0),
}

NUM_ROWS = (1, 3, 13)
TILE_ROWS = (48, 1, 12, 13, 16, 17, 31, 32, 33, 41)
"""Numbers of rows below and above all limits of products with tiles. The first leaves values in the memory that the
others share.
"""
WEIGHT, HEAD_WEIGHT = torch.linspace(0.5, 1.5, HIDDEN), torch.linspace(0.5, 1.5, HEAD_DIM)

Linear = Callable[[torch.Tensor], torch.Tensor]


def make_linears(name: str) -> list[Linear]:
    """The products of one layer: q, k and v; o; gate and up; down."""
    if name == "composed":
        return make_composed_linears()
    made: list[Linear] = []
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    generator = torch.Generator().manual_seed(3)
    for out_features, in_features in ((qkv, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)):
        if name in ("float32", "bfloat16"):
            weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
            made.append(PackedLinear(weight.to(getattr(torch, name)), torch.randn(out_features, generator=generator)))
            continue
        kind, _, bits = name.partition(" ")
        codebook, shift = CODEBOOKS[kind]
        linear = make_quantized_linear(random_weight(codebook, shift, out_features, in_features, 32), None, int(bits))
        if linear is None:
            pytest.skip("this CPU has no such product")
        made.append(linear)
    return made


def make_composed_linears() -> list[Linear]:
    """The same products as a checkpoint's formats can divide them: q and k apart from v, gate apart from up, and the
    inputs of the others in another order.
    """
    int4 = make_product("int4", (HEADS + KV_HEADS) * HEAD_DIM, HIDDEN)
    int8 = make_product("int8", KV_HEADS * HEAD_DIM, HIDDEN)
    gate, up = (make_product(kind, INNER, HIDDEN) for kind in ("uint4-halves", "uint8-zeros"))
    generator = torch.Generator().manual_seed(4)
    o, down = (
        ReorderedLinear(make_product("int4", HIDDEN, size), torch.randperm(size, generator=generator))
        for size in (HEADS * HEAD_DIM, INNER)
    )
    return [JoinedLinear([int4, int8]), o, JoinedLinear([gate, up]), down]


def make_product(kind: str, out_features: int, in_features: int) -> Linear:
    linear = make_quantized_linear(random_weight(*CODEBOOKS[kind], out_features, in_features, 32), None)
    if linear is None:
        pytest.skip("this CPU has no such product")
    return linear


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One decode step: the inputs of a layer, the sequences and the adapters."""

    total: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]
    batch: AttentionBatch
    call: LoraCall


def make_step(adapters: AdapterPool, first_page: int, lengths: list[int], seed: int) -> Step:
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(lengths)
    pages = [-(-length // 16) for length in lengths]
    starts = [sum(pages[:row]) for row in range(num_rows)]
    last = [first_page + start + (length - 1) // 16 for start, length in zip(starts, lengths, strict=True)]
    batch = AttentionBatch(
        cu_q=torch.arange(num_rows + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        pages=torch.arange(first_page, first_page + sum(pages), dtype=torch.int32),
        page_starts=torch.tensor(starts, dtype=torch.int32),
        kv_slots=torch.tensor([16 * page + (n - 1) % 16 for page, n in zip(last, lengths, strict=True)]),
        max_q=1,
    )
    turns = torch.rand(num_rows, HEAD_DIM // 2, generator=generator)
    slots = np.array([(row + seed) % 4 - 1 for row in range(num_rows)], np.int32)
    call = LoraCall(0, GROUP, adapters.tables, build_segments(slots, CpuKernels.segment_rows))
    return Step(torch.randn(num_rows, HIDDEN, generator=generator), (turns.cos(), turns.sin()), batch, call)


def run_layer(
    kernels: Kernels, linears: list[Linear], step: Step, spec: AttentionSpec, gate: str, sinks: torch.Tensor | None
) -> torch.Tensor:
    """A layer with norms of q and of the output, as the decoder runs it."""
    qkv, o, gate_up, down = linears
    total, num_rows = step.total, len(step.total)
    y = kernels.multiply(qkv, kernels.rms_norm(total, WEIGHT, 1e-6))
    kernels.lora_add(total, step.call, y)
    q, k, v = torch.split(y, [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], 1)
    q = kernels.rms_norm(q.view(num_rows, HEADS, HEAD_DIM), HEAD_WEIGHT, 1e-5)
    k, v = k.view(num_rows, KV_HEADS, HEAD_DIM), v.view(num_rows, KV_HEADS, HEAD_DIM)
    attended = outputs_of(step)
    kernels.rotate_and_store(q, k, v, *step.angles, 0, step.batch)
    kernels.paged_attention(q, 0, step.batch, spec, attended, sinks)
    y = kernels.multiply(o, attended.view(num_rows, -1))
    x = kernels.add_rms_norm(y, total, WEIGHT, 1e-6)
    inner = kernels.multiply(gate_up, x)
    activated = {
        "silu": kernels.silu_and_mul,
        "gelu": kernels.gelu_and_mul,
        "clamped": lambda x: kernels.clamped_silu_and_mul(x, 1.7, 0.5),
    }[gate](inner)
    return kernels.add_rms_norm(kernels.multiply(down, activated), total, WEIGHT, 1e-6)


def outputs_of(step: Step) -> torch.Tensor:
    """Memory for the attention of a step, which cannot be made in a recording."""
    return OUTPUTS[len(step.total)]


OUTPUTS = {num_rows: torch.zeros(num_rows, HEADS, HEAD_DIM) for num_rows in {*NUM_ROWS, *TILE_ROWS}}


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    set_num_threads(min(request.param, before))
    yield request.param
    set_num_threads(before)


@pytest.fixture
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a CPU without AMX."""
    monkeypatch.setattr(cpu_linear, "has_amx", lambda: False)
    monkeypatch.setattr(quantized_linear, "has_integer_tiles", lambda: False)


needs_tiles = pytest.mark.skipif(not has_integer_tiles(), reason="this CPU has no AMX")


@pytest.mark.usefixtures("without_tiles")
@pytest.mark.parametrize(
    ("dtype", "product", "spec", "gate", "has_sinks"),
    [
        (torch.float32, "float32", "plain", "silu", False),
        (torch.bfloat16, "bfloat16", "window and cap", "gelu", True),
        (torch.bfloat16, "int8 16", "plain", "clamped", False),
        (torch.float32, "int8 8", "plain", "silu", False),
        (torch.float32, "uint4-halves 16", "window and cap", "silu", True),
        (torch.bfloat16, "int4 8", "plain", "gelu", False),
        (torch.bfloat16, "composed", "plain", "silu", False),
    ],
    ids=str,
)
def test_program_equals_the_kernels(
    threads: int, dtype: torch.dtype, product: str, spec: str, gate: str, has_sinks: bool
) -> None:
    check_program(
        PageGeometry(1, KV_HEADS, HEAD_DIM, dtype.itemsize, dtype.itemsize), dtype, product, spec, gate, has_sinks
    )


@pytest.mark.usefixtures("without_tiles")
@pytest.mark.parametrize(("spec", "has_sinks"), [("plain", True), ("window and cap", False)])
def test_program_with_int8_k_and_v_equals_the_kernels(threads: int, spec: str, has_sinks: bool) -> None:
    geometry = PageGeometry(1, KV_HEADS, HEAD_DIM, 1, 2, elements_per_scale=HEAD_DIM)
    check_program(geometry, torch.bfloat16, "bfloat16", spec, "silu", has_sinks)


@needs_tiles
@pytest.mark.parametrize(
    "product", ["bfloat16", "int8 16", "int8 8", "uint4-halves 16", "int4 8", "nf4 16", "composed"]
)
def test_program_with_tiles_equals_the_kernels(threads: int, product: str) -> None:
    geometry = PageGeometry(1, KV_HEADS, HEAD_DIM, 2, 2)
    check_program(geometry, torch.bfloat16, product, "plain", "silu", False, TILE_ROWS)


@needs_tiles
@pytest.mark.skipif(not runs_here("amx"), reason="tiles are emulated")
@pytest.mark.parametrize("product", ["bfloat16", "int8 16"])
def test_a_program_leaves_no_tiles_to_its_thread(product: str) -> None:
    """Linux would save 8 KiB of tiles on every switch of the thread from then on."""
    configure_tiles_here()
    assert parts_in_use() & TILE_PARTS
    pool = adapter_pool(MODULES, RANKS, PageGeometry(1, KV_HEADS, HEAD_DIM, 4, 4), torch.float32).pool
    recorder = start_recording(CpuKernels(pool), 16, ())
    recorder.multiply(make_linears(product)[0], torch.zeros(16, HIDDEN))
    program = recorder.finish()
    assert program.num_threads == 1
    program.run((), build_segments(np.full(16, -1, np.int32), CpuKernels.segment_rows))
    assert not parts_in_use() & TILE_PARTS


TILE_PARTS = 3 << 17
"""The configuration and the data of tiles (Intel, "Architecture Instruction Set Extensions Programming Reference")."""


@helper
def configure_tiles_here() -> None:
    amx.configure_tiles(1, 1)


@helper
def parts_in_use() -> int:
    return _parts_in_use()


@intrinsic
def _parts_in_use(typing_context: Any) -> Any:
    """The parts of the calling thread's state that are in use, one bit each (the instruction `xgetbv`)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(32)])
        return builder.call(ir.Function(builder.module, kind, "llvm.x86.xgetbv"), [ir.IntType(32)(1)])

    return types.int64(), generate


def check_program(
    geometry: PageGeometry,
    dtype: torch.dtype,
    product: str,
    spec: str,
    gate: str,
    has_sinks: bool,
    all_num_rows: Sequence[int] = NUM_ROWS,
) -> None:
    """`dtype` is that of adapters, and of K and V unless the geometry has scales."""
    adapters = adapter_pool(MODULES, RANKS, geometry, dtype)
    # Pages for K and V follow the adapters' pages.
    first_page = adapters.pool.raw.shape[0]
    raw = torch.cat([adapters.pool.raw, torch.zeros(90, *adapters.pool.raw.shape[1:], dtype=torch.uint8)])
    scales = torch.zeros(raw.shape[0], 1, geometry.num_scales, dtype=torch.bfloat16)
    kv_scales = scales if geometry.num_scales else None
    kv = raw.view(dtype if kv_scales is None else torch.int8)
    pool = PoolViews(raw=raw, kv=kv, adapter=raw.view(dtype), geometry=geometry, kv_scales=kv_scales)
    kernels, linears = CpuKernels(pool), make_linears(product)
    sinks = torch.linspace(-1, 1, HEADS) if has_sinks else None
    for num_rows in all_num_rows:
        lengths = [[1, 33, 16, 17, 5][row % 5] for row in range(num_rows)]
        first, second = (make_step(adapters, first_page, lengths, seed) for seed in (1, 2))
        recorder = start_recording(kernels, num_rows, (first.batch,))
        total, angles = first.total.clone(), tuple(one.clone() for one in first.angles)
        recorded_step = Step(total, (angles[0], angles[1]), first.batch, first.call)
        with recorder.recording():
            found = run_layer(cast(Kernels, recorder), linears, recorded_step, SPECS[spec], gate, sinks)
        # Programs with little work run on one thread.
        program = replace(recorder.finish(), work=SERIAL_WORK)
        before = pool.raw.clone()
        for step in (first, second, first):
            # The program reads the same tensors, with the values of another step.
            pool.raw.copy_(before)
            expected_total = step.total.clone()
            expected = run_layer(
                kernels, linears, Step(expected_total, step.angles, step.batch, step.call), SPECS[spec], gate, sinks
            ).clone()
            expected_pool = pool.raw.clone()
            expected_scales = scales.clone()
            scales.zero_()
            pool.raw.copy_(before)
            total.copy_(step.total)
            for own, value in zip(angles, step.angles, strict=True):
                own.copy_(value)
            program.run((step.batch,), step.call.segments)
            assert expected.isfinite().all()
            assert torch.equal(found, expected)
            assert torch.equal(total, expected_total)
            assert torch.equal(pool.raw, expected_pool)
            assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize(
    "compute",
    [
        lambda kernels, x: x * 2,
        lambda kernels, x: x.add_(1),
        lambda kernels, x: torch.empty(3),
        lambda kernels, x: PackedLinear(torch.zeros(4, HIDDEN))(x),
        lambda kernels, x: kernels.route(x, RoutingSpec(4, 2, True)),
        lambda kernels, x: kernels.multiply(lambda x: x, x),
        lambda kernels, x: kernels.multiply(JoinedLinear([PackedLinear(torch.zeros(32, HIDDEN))] * 2), x),
        lambda kernels, x: kernels.multiply(JoinedLinear([make_product("int4", 40, HIDDEN)] * 2), x),
        lambda kernels, x: kernels.lora_affine(None, x),
    ],
    ids=[
        "product",
        "in place",
        "new tensor",
        "direct linear",
        "router",
        "unknown linear",
        "joined floats",
        "joined panels",
        "affine",
    ],
)
def test_what_a_program_would_not_repeat_is_refused(compute: Callable[[Any, torch.Tensor], object]) -> None:
    geometry = PageGeometry(1, KV_HEADS, HEAD_DIM, 4, 4)
    raw = torch.zeros(2, 1, geometry.page_bytes, dtype=torch.uint8)
    pool_type = type(adapter_pool(MODULES, RANKS, geometry, torch.float32).pool)
    kernels = CpuKernels(pool_type(raw, raw.view(torch.float32), raw.view(torch.float32), geometry))
    recorder = start_recording(kernels, 1, ())
    x = torch.zeros(1, HIDDEN)
    with pytest.raises(NotRecordable), recorder.recording():
        compute(recorder, x)


@pytest.mark.parametrize(
    ("record", "shapes"),
    [
        (lambda kernels, _, x, weight: kernels.rms_norm(x, weight, 1e-6), [(1, HIDDEN), (HIDDEN,)]),
        (
            lambda kernels, _, x, total, weight: kernels.add_rms_norm(x, total, weight, 1e-6),
            [(1, HIDDEN), (1, HIDDEN), (HIDDEN,)],
        ),
        (
            lambda kernels, step, *tensors: kernels.rotate_and_store(*tensors, 0, step.batch),
            [(1, HEADS, HEAD_DIM), *[(1, KV_HEADS, HEAD_DIM)] * 2, *[(1, HEAD_DIM // 2)] * 2],
        ),
        (
            lambda kernels, step, q, out, sinks: kernels.paged_attention(q, 0, step.batch, SPECS["plain"], out, sinks),
            [(1, HEADS, HEAD_DIM), (1, HEADS, HEAD_DIM), (HEADS,)],
        ),
        (lambda kernels, _, x: kernels.silu_and_mul(x), [(1, 2 * INNER)]),
        (lambda kernels, _, x: kernels.multiply(PackedLinear(torch.zeros(4, HIDDEN)), x), [(1, HIDDEN)]),
        (lambda kernels, step, x, y: kernels.lora_add(x, step.call, y), [(1, HIDDEN), (1, 2 * HIDDEN)]),
    ],
    ids=["norm", "added norm", "rotation", "attention", "gate", "product", "adapters"],
)
def test_program_keeps_the_memory_that_it_uses(record: Callable[..., object], shapes: list[tuple[int, ...]]) -> None:
    """Otherwise, a program would write to memory that has another owner by then."""
    geometry = PageGeometry(1, KV_HEADS, HEAD_DIM, 4, 4)
    adapters = adapter_pool(MODULES, RANKS, geometry, torch.float32)
    step = make_step(adapters, 0, [1], 1)
    recorder = start_recording(CpuKernels(adapters.pool), 1, (step.batch,))
    tensors = [torch.zeros(shape) for shape in shapes]
    kept = [weakref.ref(tensor) for tensor in tensors]
    record(recorder, step, *tensors)
    program = recorder.finish()
    del recorder, tensors
    gc.collect()
    assert all(one() is not None for one in kept)
    assert len(program.operations) > 0


@pytest.mark.parametrize(("width", "uses_all"), [(2000, False), (3000, True)], ids=["little work", "much work"])
def test_a_program_with_little_work_runs_on_one_thread(threads: int, width: int, uses_all: bool) -> None:
    geometry = PageGeometry(1, KV_HEADS, HEAD_DIM, 4, 4)
    pool = adapter_pool(MODULES, RANKS, geometry, torch.float32).pool
    recorder = start_recording(CpuKernels(pool), 1, ())
    recorder.multiply(PackedLinear(torch.zeros(width, width)), torch.zeros(1, width))
    recorder.multiply(PackedLinear(torch.zeros(1, width)), torch.zeros(1, width))
    program = recorder.finish()
    assert program.work == width * (width + 1)
    assert program.num_threads == (torch.get_num_threads() if uses_all else 1)


@pytest.mark.parametrize(
    ("lengths", "slots", "message"),
    [
        ([1, 1], [0], r"for 1 rows, not \(2, 2, 2, 2\)"),
        ([1], [-1, 0], "for 1 rows, but an adapter has row 1"),
    ],
    ids=["sequences", "adapters"],
)
def test_a_step_with_more_rows_than_the_program_is_refused(lengths: list[int], slots: list[int], message: str) -> None:
    """Otherwise, the program would write to memory that it does not own."""
    geometry = PageGeometry(1, KV_HEADS, HEAD_DIM, 4, 4)
    adapters = adapter_pool(MODULES, RANKS, geometry, torch.float32)
    first, second = make_step(adapters, 0, [1], 1), make_step(adapters, 0, lengths, 1)
    recorder = start_recording(CpuKernels(adapters.pool), 1, (first.batch,))
    recorder.lora_add(torch.zeros(1, HIDDEN), first.call, torch.zeros(1, 2 * HIDDEN))
    segments = build_segments(np.array(slots, np.int32), CpuKernels.segment_rows)
    with pytest.raises(AssertionError, match=message):
        recorder.finish().run((second.batch,), segments)


def test_recording_does_not_import_the_compiler_of_torch() -> None:
    """Torch wraps a mode's dispatch in a function that imports it, unless the mode declines."""
    assert not hasattr(_OnlyViews.__torch_dispatch__, "__wrapped__")


@torch.inference_mode()
def test_a_reshape_that_copies_is_not_recorded_as_a_view() -> None:
    heads = torch.zeros(3, 4, 24)
    with _OnlyViews():
        assert heads.reshape(3, 96).shape == (3, 96)
        with pytest.raises(NotRecordable):
            heads.reshape(3, 4, 12, 2).transpose(-1, -2).flatten(-2)
