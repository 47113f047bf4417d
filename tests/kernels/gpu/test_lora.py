from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from loramux.kernels.layout import AFFINE, NO_AFFINE, LinearShape, PageGeometry
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AdapterTables, LoraCall, ModuleGroup, PoolViews, Segments
from tests.engine.device.fake_gpu import fake_driver
from tests.kernels.gpu.interpreted import DEVICE, FOR_GPUS, HAS_GPU, import_kernels

RANKS = (0, 1, 3, 31, 64, 128)
NUM_SLOTS = 5
ALONE = "LORAMUX_TEST_ALONE"
"""Environment variable that is set when a test runs in its own process."""
POISON = 1 << 30
"""An invalid row or segment number."""

# Rounding error of y. Float32 sums are computed in another order, and the interpreter truncates to bfloat16.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 2.0**-8 if HAS_GPU else 2.0**-7}

# The slots of a batch's rows, the number of columns in its grid, and the maximum number of rows in a segment.
Batch = tuple[list[int], int, int]
MIXED = [-1, 0, 2, 2, -1, 4, 0, 0, 1, -1, 3, 2, 2]
BATCHES: dict[str, Batch] = {
    "empty": ([], 0, 16),
    "empty-padded": ([], 3, 16),
    "all-base": ([-1] * 6, 6, 16),
    "one-row": ([2], 1, 1),
    "one-base-row": ([-1], 1, 1),
    "one-adapter-40-rows": ([1] * 40, 5, 16),
    "one-adapter-40-rows-decode": ([1] * 40, 40, 16),
    "one-adapter-40-single-rows": ([1] * 40, 40, 1),
    "mixed": (MIXED, 6, 16),
    "mixed-decode": (MIXED, 13, 16),
    "mixed-single-rows": (MIXED, 13, 1),
}
TILES = {"tiles": (5, 16), "decode-tiles": (9, 16), "single-rows": (9, 1)}
"""Numbers of segments, and the maximum number of rows in one."""
SHAPES = pytest.mark.parametrize(("num_segments", "max_rows"), TILES.values(), ids=TILES)

ONE = (64,)
THREE = (64, 63, 200)


@pytest.fixture(scope="module")
def triton_kernels() -> dict[str, ModuleType]:
    names = ("addresses", "launches", "shrink", "expand")
    return dict(zip(names, import_kernels(*names), strict=True))


@pytest.fixture
def shrink(triton_kernels: dict[str, ModuleType]) -> Callable[..., None]:
    return triton_kernels["shrink"].lora_shrink


@pytest.fixture
def expand(triton_kernels: dict[str, ModuleType]) -> Callable[..., None]:
    return triton_kernels["expand"].lora_expand


def geometry_of(dtype: torch.dtype) -> PageGeometry:
    """Pages of 1,024 or 3,840 elements per layer. 3,840 is not a power of two."""
    itemsize = dtype.itemsize
    num_kv_heads, head_dim = (2, 16) if itemsize == 4 else (3, 40)
    return PageGeometry(2, num_kv_heads, head_dim, max(2, itemsize), itemsize)


def group_of(in_features: int, out_features: Sequence[int]) -> ModuleGroup:
    """A group of modules 1, 2 and so on of the tables. Module 0 belongs to another group."""
    offsets = np.concatenate([[0], np.cumsum(out_features)])[:-1].tolist()
    return ModuleGroup(tuple(range(1, len(out_features) + 1)), in_features, tuple(out_features), tuple(offsets))


def padded_segments(slots: Sequence[int], num_segments: int, max_rows: int = 16) -> Segments:
    """A batch's segments as in a captured graph: slots are padded with -1, and rows and starts with poison."""
    segments = build_segments(np.array(slots, np.int32), max_rows)
    missing = num_segments - segments.num_segments
    assert missing >= 0
    tail = torch.full((missing,), POISON, dtype=torch.int32)
    return Segments(
        rows=torch.cat([segments.rows, tail]).to(DEVICE),
        starts=torch.cat([segments.starts, tail]).to(DEVICE),
        slots=torch.cat([segments.slots, torch.full_like(tail, -1)]).to(DEVICE),
        max_rows=max_rows,
    )


def on_device(adapters: Any) -> Any:
    """Copy the adapters' pool and tables to the device under test."""
    pool, tables = adapters.pool, adapters.tables
    dtype, raw = pool.adapter.dtype, pool.raw.to(DEVICE)
    fields = {name: getattr(tables, name).to(DEVICE) for name in ("page_table", "off", "rank", "scale")}
    return replace(
        adapters,
        pool=replace(pool, raw=raw, kv=raw.view(pool.kv.dtype), adapter=raw.view(dtype)),
        tables=replace(tables, **fields),
    )


def check(
    adapters: Any,
    group: ModuleGroup,
    slots: Sequence[int],
    layer: int,
    x: torch.Tensor,
    before: torch.Tensor,
    y: torch.Tensor,
    planes: torch.Tensor,
) -> None:
    """Compare with float64. Only rounding errors are allowed in `y`, and `planes` must have no other changes."""
    x, before, y, planes = x.cpu(), before.cpu(), y.cpu(), planes.cpu()
    scales, tolerance = adapters.tables.scale.cpu().double(), TOLERANCE[y.dtype]
    for t, slot in enumerate(slots):
        if slot < 0:
            assert planes[:, t].isnan().all()
            assert torch.equal(y[t], before[t])
            continue
        for i, module in enumerate(group.modules):
            a, b = adapters.a[slot, layer, module].double(), adapters.b[slot, layer, module].double()
            v = a @ x[t].double()
            rank = v.shape[0]
            torch.testing.assert_close(planes[:, t, i, :rank].double().sum(0), v, rtol=1e-4, atol=1e-4)
            assert planes[:, t, i, rank:].isnan().all()
            columns = slice(group.out_offsets[i], group.out_offsets[i] + group.out_features[i])
            if not rank:
                assert torch.equal(y[t, columns], before[t, columns])
            expected = before[t, columns].double() + scales[slot, layer, module] * (v @ b)
            expected = adapters.output(slot, layer, module, expected)
            torch.testing.assert_close(y[t, columns].double(), expected, rtol=tolerance, atol=1e-3)


def run_case(
    shrink: Callable[..., None],
    expand: Callable[..., None],
    make_adapter_pool: Callable[..., Any],
    pool_dtype: torch.dtype,
    x_dtype: torch.dtype,
    in_features: int,
    out_features: Sequence[int],
    batch: Batch,
    num_planes: int,
    ranks: Sequence[int] = RANKS,
    pdl: bool = False,
) -> None:
    """x, planes and y are views into wider rows that are poisoned or guarded."""
    slots, num_segments, max_rows = batch
    rng = np.random.default_rng(in_features + len(slots))
    group = group_of(in_features, out_features)
    modules = [LinearShape("other", 72, 72), *(LinearShape("m", in_features, out) for out in out_features)]
    table = rng.choice(ranks, (NUM_SLOTS, 2, len(modules))).astype(np.int32)
    adapters = on_device(make_adapter_pool(modules, table, geometry_of(pool_dtype), pool_dtype))
    segments = padded_segments(slots, num_segments, max_rows)
    num_rows, layer = len(slots), 1

    x = torch.full((num_rows, in_features + 5), torch.nan, dtype=x_dtype)
    x[:, 2:-3] = torch.randn(num_rows, in_features)
    x = x.to(DEVICE)[:, 2:-3]
    # The planes fit a model's largest batch, which has more rows than this one.
    planes = torch.full((num_planes, num_rows + 3, len(out_features), max(ranks) + 2), torch.nan, device=DEVICE)
    y_wide = torch.randn(num_rows, group.total_out + 3).to(DEVICE, x_dtype)
    before = y_wide.clone()
    y = y_wide[:, 1:-2]
    call = LoraCall(layer, group, adapters.tables, segments)
    shrink(adapters.pool, x, call, planes, pdl=pdl)
    expand(adapters.pool, planes, call, y, pdl=pdl)
    check(adapters, group, slots, layer, x, before[:, 1:-2], y, planes)
    assert planes[:, num_rows:].isnan().all()
    assert torch.equal(y_wide[:, [0, -2, -1]], before[:, [0, -2, -1]])


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(batch, id=name, marks=FOR_GPUS if name == "one-adapter-40-single-rows" else ())
        for name, batch in BATCHES.items()
    ],
)
def test_equals_dense_matrices(
    batch: Batch,
    shrink: Callable[..., None],
    expand: Callable[..., None],
    make_adapter_pool: Callable[..., Any],
) -> None:
    run_case(shrink, expand, make_adapter_pool, torch.float32, torch.float32, 300, THREE, batch, 2)


WRITTEN_BATCHES: dict[str, Batch] = {
    **BATCHES,
    "large-mixed": ([2] * 70 + [-1] * 3 + [0] + [4] * 20 + [0] * 2, 7, 64),
    "large-all-base": ([-1] * 300, 3, 64),
    "base-last": ([3] * 260 + [-1], 18, 16),
}
RARELY_WRITTEN = ("one-adapter", "one-base", "large-all")
"""Beginnings of the names of batches that the interpreter runs only in campaigns."""


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(batch, id=name, marks=FOR_GPUS if name.startswith(RARELY_WRITTEN) else ())
        for name, batch in WRITTEN_BATCHES.items()
    ],
)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="float32", marks=pytest.mark.campaign),
        pytest.param(torch.float16, id="float16"),
    ],
)
def test_written_products_equal_products_added_to_zeros(
    dtype: torch.dtype,
    batch: Batch,
    shrink: Callable[..., None],
    expand: Callable[..., None],
    make_adapter_pool: Callable[..., Any],
) -> None:
    """All columns of `y` are written, with zeros where no adapter changes them, and no memory beside them."""
    slots, num_segments, max_rows = batch
    rng = np.random.default_rng(len(slots))
    group, layer, num_rows = group_of(128, THREE), 1, len(slots)
    modules = [LinearShape("other", 72, 72), *(LinearShape("m", 128, out) for out in THREE)]
    ranks = rng.choice(RANKS, (NUM_SLOTS, 2, len(modules))).astype(np.int32)
    ranks[4, 1, 2] = 0
    # The scale of a module without ranks is undefined.
    adapters = make_adapter_pool(modules, ranks, geometry_of(dtype), dtype)
    adapters.tables.off[..., AFFINE] = NO_AFFINE
    adapters.tables.scale[adapters.tables.rank == 0] = torch.inf
    adapters = on_device(adapters)
    segments = padded_segments(slots, num_segments, max_rows)
    x = torch.randn(num_rows, 128).to(DEVICE, dtype)
    planes = torch.full((2, num_rows, len(THREE), max(RANKS)), torch.nan, device=DEVICE)
    call = LoraCall(layer, group, adapters.tables, segments)
    shrink(adapters.pool, x, call, planes)
    added = torch.zeros(num_rows, group.total_out, dtype=dtype, device=DEVICE)
    expand(adapters.pool, planes, call, added)
    wide = torch.full((num_rows + 2, group.total_out + 3), torch.nan, dtype=dtype, device=DEVICE)
    row_slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    expand(adapters.pool, planes, call, wide[1:-1, 1:-2], row_slots=row_slots)
    assert torch.equal(wide[1:-1, 1:-2], added)
    assert wide[[0, -1]].isnan().all()
    assert wide[:, [0, -2, -1]].isnan().all()


LARGE_BATCHES: dict[str, Batch] = {
    "one-full": ([1] * 64, 1, 64),
    "one-row-more": ([1] * 65, 2, 64),
    "mixed": ([2] * 70 + [-1] * 3 + [0] + [4] * 20 + [0] * 2, 7, 64),
    "all-base": ([-1] * 70, 3, 64),
}


@pytest.mark.parametrize("batch", LARGE_BATCHES.values(), ids=LARGE_BATCHES.keys())
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=FOR_GPUS)], ids=["float32", "float16"]
)
def test_large_segments_equal_dense_matrices(
    dtype: torch.dtype,
    batch: Batch,
    shrink: Callable[..., None],
    expand: Callable[..., None],
    make_adapter_pool: Callable[..., Any],
) -> None:
    run_case(shrink, expand, make_adapter_pool, dtype, dtype, 300, THREE, batch, 2)


@pytest.mark.parametrize(
    ("num_segments", "max_rows", "pool_dtype", "x_dtype"),
    [
        pytest.param(*sizes, *dtypes, id=f"{kind}-{name}", marks=() if number % 3 == place else FOR_GPUS)
        for place, (kind, sizes) in enumerate(TILES.items())
        for number, (name, dtypes) in enumerate(
            {
                "float16": (torch.float16, torch.float16),
                "bfloat16": (torch.bfloat16, torch.bfloat16),
                "bfloat16-pool-float32-rows": (torch.bfloat16, torch.float32),
                "float32-pool-float16-rows": (torch.float32, torch.float16),
            }.items()
        )
    ]
    + [
        pytest.param(*sizes, torch.uint8, x_dtype, id=f"{kind}-fp8-pool-{name}-rows")
        for (kind, sizes), (name, x_dtype) in zip(
            TILES.items(),
            {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.items(),
            strict=True,
        )
    ],
)
def test_every_pair_of_dtypes_equals_dense_matrices(
    num_segments: int,
    max_rows: int,
    pool_dtype: torch.dtype,
    x_dtype: torch.dtype,
    shrink: Callable[..., None],
    expand: Callable[..., None],
    make_adapter_pool: Callable[..., Any],
) -> None:
    batch = ([4, 0, -1, 0, 0, 3], num_segments, max_rows)
    run_case(shrink, expand, make_adapter_pool, pool_dtype, x_dtype, 128, THREE, batch, 1)


# The interpreter runs each two of the values.
@pytest.mark.parametrize(
    ("max_rows", "num_planes", "in_features"),
    [
        pytest.param(
            max_rows,
            num_planes,
            in_features,
            id=f"{kind}-planes-{num_planes}-in-{in_features}",
            marks=FOR_GPUS if (first + second + third) % 2 else (),
        )
        for first, (kind, max_rows) in enumerate((("tiles", 16), ("single-rows", 1)))
        for second, num_planes in enumerate((1, 3, 7))
        for third, in_features in enumerate((63, 512))
    ],
)
def test_any_number_of_planes_equals_dense_matrices(
    max_rows: int,
    num_planes: int,
    in_features: int,
    shrink: Callable[..., None],
    expand: Callable[..., None],
    make_adapter_pool: Callable[..., Any],
) -> None:
    """Some cases have more planes than A has chunks, or a number of planes that does not divide the chunks evenly."""
    batch = ([0, 0, 1], 3, max_rows)
    run_case(shrink, expand, make_adapter_pool, torch.float32, torch.float32, in_features, ONE, batch, num_planes)


PDL_BATCHES = ["mixed", "mixed-decode", "mixed-single-rows"]


@pytest.mark.parametrize("batch", [BATCHES[name] for name in PDL_BATCHES], ids=PDL_BATCHES)
def test_overlapping_launches_equal_dense_matrices(
    batch: Batch,
    triton_kernels: dict[str, ModuleType],
    shrink: Callable[..., None],
    expand: Callable[..., None],
    make_adapter_pool: Callable[..., Any],
) -> None:
    if not triton_kernels["launches"].supports_pdl(DEVICE):
        pytest.skip("needs compute capability 9")
    dtype = torch.bfloat16
    run_case(shrink, expand, make_adapter_pool, dtype, dtype, 512, THREE, batch, 2, pdl=True)


@SHAPES
def test_the_largest_rank_equals_dense_matrices(
    num_segments: int,
    max_rows: int,
    shrink: Callable[..., None],
    expand: Callable[..., None],
    make_adapter_pool: Callable[..., Any],
) -> None:
    batch = ([0, 1, 0, -1, -1, 1], num_segments, max_rows)
    run_case(shrink, expand, make_adapter_pool, torch.float16, torch.float16, 128, ONE, batch, 1, (256,))


# The interpreter multiplies matrices with numpy, which emits warnings.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_non_finite_row_affects_only_itself(
    shrink: Callable[..., None], expand: Callable[..., None], make_adapter_pool: Callable[..., Any]
) -> None:
    geometry = geometry_of(torch.float32)
    modules = [LinearShape("m", 128, 128)]
    adapters = on_device(make_adapter_pool(modules, np.full((1, 2, 1), 4, np.int32), geometry, torch.float32))
    group = ModuleGroup((0,), 128, (128,), (0,))
    x = torch.randn(3, 128, device=DEVICE)
    x[1, 7] = torch.inf
    planes, y = torch.full((1, 3, 1, 4), torch.nan, device=DEVICE), torch.zeros(3, 128, device=DEVICE)
    segments = padded_segments([0, 0, 0], 1)
    call = LoraCall(0, group, adapters.tables, segments)
    shrink(adapters.pool, x, call, planes)
    expand(adapters.pool, planes, call, y)
    assert y[[0, 2]].isfinite().all()
    assert not y[1].isfinite().any()


@SHAPES
def test_captured_launch_works_for_any_segments(
    num_segments: int,
    max_rows: int,
    shrink: Callable[..., None],
    expand: Callable[..., None],
    make_adapter_pool: Callable[..., Any],
) -> None:
    """The launch is captured once, as in a graph. Segments and tables then change in place."""
    geometry = geometry_of(torch.float32)
    modules = [LinearShape("m", 128, 96)]
    ranks = np.array([3, 31, 64], np.int32).reshape(3, 1, 1).repeat(2, 1)
    adapters = on_device(make_adapter_pool(modules, ranks, geometry, torch.float32))
    group, tables = ModuleGroup((0,), 128, (96,), (0,)), adapters.tables
    x, y = torch.randn(9, 128, device=DEVICE), torch.zeros(9, 96, device=DEVICE)
    planes = torch.full((2, 9, 1, 64), torch.nan, device=DEVICE)
    segments = padded_segments([-1] * 9, num_segments, max_rows)
    segments = replace(segments, rows=torch.full((9,), POISON, dtype=torch.int32, device=DEVICE))

    def launch() -> None:
        call = LoraCall(0, group, tables, segments)
        shrink(adapters.pool, x, call, planes)
        expand(adapters.pool, planes, call, y)

    replay = launch
    if HAS_GPU:
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        replay = graph.replay
    for slots in ([0, 0, 1, -1, 2, 2, 1, 2, 0], [1] * 9, [-1, -1, 2, -1, -1, -1, -1, -1, -1], [-1] * 9):
        step = padded_segments(slots, num_segments, max_rows)
        segments.rows[: min(9, step.rows.shape[0])] = step.rows[:9]
        segments.starts.copy_(step.starts)
        segments.slots.copy_(step.slots)
        planes.fill_(torch.nan)
        before = torch.randn(9, 96, device=DEVICE)
        y.copy_(before)
        replay()
        check(adapters, group, slots, 0, x, before, y, planes)
    tables.rank[:, 0, 0] = 0
    segments.slots[0], segments.starts[0], segments.starts[1] = 1, 0, 1
    y.copy_(before)
    replay()
    assert torch.equal(y, before)


@pytest.mark.parametrize("num_segments", [1, 16, 256, 1024], ids=lambda n: f"segments-{n}")
def test_number_of_splits_suits_the_batch(num_segments: int, triton_kernels: dict[str, ModuleType]) -> None:
    num_splits = triton_kernels["shrink"].num_splits
    narrow, wide = group_of(63, (64,)), group_of(14336, (64, 64))
    assert num_splits(narrow, 32768, num_segments, num_segments) == 1
    assert 1 <= num_splits(wide, 32768, 10 * num_segments, num_segments) <= 16
    assert 14 <= num_splits(wide, 32768, num_segments, num_segments) <= 16


@pytest.mark.parametrize(
    ("dtype", "page_elements", "message"),
    [
        pytest.param(torch.float64, 1024, "support bfloat16, float16, float32 and FP8", id="dtype"),
        pytest.param(torch.float32, 8 * 125, "chunks of 8; .* at least 16", id="chunk"),
    ],
)
def test_unsupported_geometry_is_refused(
    dtype: torch.dtype, page_elements: int, message: str, triton_kernels: dict[str, ModuleType]
) -> None:
    geometry = PageGeometry(1, 1, 1, page_elements, 32)
    assert geometry.adapter_elements == page_elements
    with pytest.raises(ValueError, match=message):
        triton_kernels["addresses"].check_geometry(geometry, group_of(128, (128,)), dtype)


class CompiledForHopper:
    """Intercepts a kernel's launches and compiles them for compute capability 9.0, which needs no GPU."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled: Any = None

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *arguments: Any, **options: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self._kernel.arg_names
        constants = {(names.index(name),): value for name, value in options.items() if name in names}
        pointers = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
        signature = dict.fromkeys(names, "constexpr")
        aligned = {}
        for i, argument in enumerate(arguments):
            is_tensor = isinstance(argument, torch.Tensor)
            signature[names[i]] = pointers[argument.dtype] if is_tensor else "i32"
            # Declare the alignment that Triton's launcher would derive from these arguments.
            if is_tensor or (names[i] != "layer" and argument % 16 == 0):
                aligned[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self._kernel, signature=signature, constexprs=constants, attrs=aligned)
        launch = {name: value for name, value in options.items() if name not in names}
        self.compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)


def run_alone(request: pytest.FixtureRequest) -> None:
    """Run a test in its own process, because a process that has interpreted kernels can no longer compile them."""
    test = f"{__file__}::{request.node.name}"
    options = ["-p", "no:cacheprovider", "-p", "no:schemathesis", "--noconftest", "-m", "campaign or not campaign"]
    command = [sys.executable, "-m", "pytest", *options, test]
    done = subprocess.run(command, env={**os.environ, ALONE: "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor whose contents are never read, for launches that are only compiled."""
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.campaign
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")
def test_outer_modules_compile_for_hopper(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding and head of Llama-3.1-8B, with pages addressed as one layer of 4 MiB."""
    if ALONE not in os.environ:
        run_alone(request)
        return
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = {}
    for file, name in [
        *((name, name) for name in ("gather", "shrink", "expand")),
        *(("trained_rows", name) for name in ("replace_rows", "replace_columns")),
    ]:
        module = importlib.import_module(f"loramux.kernels.gpu.lora.{file}")
        kernels[name] = CompiledForHopper(getattr(module, f"{name}_kernel"))
        monkeypatch.setattr(module, f"{name}_kernel", kernels[name])
    geometry = PageGeometry(32, 8, 128, 2, 2)
    raw = tensor(9, 32, geometry.page_bytes, dtype=torch.uint8)
    pool = PoolViews(raw, raw.view(torch.bfloat16), raw.view(torch.bfloat16), geometry).flat
    tables = AdapterTables(tensor(64, 128), tensor(64, 1, 2, 3), tensor(64, 1, 2), tensor(64, 1, 2).float())
    segments = Segments(tensor(64), tensor(17), tensor(16), 64)
    embedding = ModuleGroup((0,), 128256, (4096,), (0,), is_embedding=True)
    head = ModuleGroup((1,), 4096, (128256,), (0,))
    gpu = importlib.import_module("loramux.kernels.gpu.kernels").GpuLora(pool)
    hidden, logits = tensor(64, 4096, dtype=torch.bfloat16), tensor(64, 128256, dtype=torch.bfloat16)
    call = LoraCall(0, embedding, tables, segments)
    planes = gpu.lora_planes(call, 64)
    gpu.lora_gather(tensor(64), call, planes)
    gpu.lora_expand(planes, call, hidden)
    gpu.replace_rows(tensor(64), call, hidden)
    call = LoraCall(0, head, tables, segments)
    planes = gpu.lora_planes(call, 64)
    gpu.lora_shrink(hidden, call, planes)
    gpu.lora_expand(planes, call, logits)
    gpu.replace_columns(hidden, call, logits)
    for name in ("gather", "replace_rows"):
        assert "ld.global" in kernels[name].compiled.asm["ptx"]
    for name in ("shrink", "expand", "replace_columns"):
        assert "mma.sync" in kernels[name].compiled.asm["ptx"]


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")
def test_one_program_computes_the_logits_of_any_number_of_classes() -> None:
    """The warm-up runs it for a whole vocabulary."""
    gpu, ahead = (importlib.import_module(f"loramux.kernels.gpu.{name}") for name in ("kernels", "ahead"))
    geometry = PageGeometry(2, 2, 32, 2, 2)
    raw = tensor(9, 2, geometry.page_bytes, dtype=torch.uint8)
    pool = PoolViews(raw, raw.view(torch.bfloat16), raw.view(torch.bfloat16), geometry).flat
    tables = AdapterTables(tensor(4, 8), tensor(4, 1, 1, 3), tensor(4, 1, 1), tensor(4, 1, 1).float())
    call = LoraCall(0, ModuleGroup((0,), 128, (320,), (0,)), tables, Segments(tensor(4), tensor(5), tensor(4), 1))
    with fake_driver(90), ahead.recorded_programs() as lines:
        for num_columns in (320, 1, 2, 16):
            y = tensor(4, num_columns, dtype=torch.bfloat16)
            gpu.GpuLora(pool).replace_columns(tensor(4, 128, dtype=torch.bfloat16), call, y)
    assert len(lines) == 1


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("num_tokens", "num_segments", "max_rows", "pdl"),
    [
        pytest.param(8, 8, 1, True, id="single-rows"),
        pytest.param(64, 64, 16, True, id="decode", marks=pytest.mark.campaign),
        pytest.param(2048, 160, 16, False, id="mixed", marks=pytest.mark.campaign),
        pytest.param(2048, 64, 64, False, id="prefill", marks=pytest.mark.campaign),
    ],
)
def test_compiles_for_hopper(
    num_tokens: int,
    num_segments: int,
    max_rows: int,
    pdl: bool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler rejects some code that the interpreter accepts. The shapes are as in Llama-3.1-8B's q/k/v."""
    if ALONE not in os.environ:
        run_alone(request)
        return
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lora_shrink = importlib.import_module("loramux.kernels.gpu.lora.shrink")
    lora_expand = importlib.import_module("loramux.kernels.gpu.lora.expand")
    shrink_kernel = CompiledForHopper(lora_shrink.shrink_kernel)
    lora_gather = importlib.import_module("loramux.kernels.gpu.lora.gather")
    expand_kernel = CompiledForHopper(lora_expand.expand_kernel)
    gather_kernel = CompiledForHopper(lora_gather.gather_kernel)
    monkeypatch.setattr(lora_shrink, "shrink_kernel", shrink_kernel)
    monkeypatch.setattr(lora_expand, "expand_kernel", expand_kernel)
    monkeypatch.setattr(lora_gather, "gather_kernel", gather_kernel)

    geometry = PageGeometry(32, 8, 128, 2, 2)
    E = geometry.adapter_elements
    group = ModuleGroup((0, 1, 2), 4096, (4096, 1024, 1024), (0, 4096, 5120))
    raw = tensor(9, 32, geometry.page_bytes, dtype=torch.uint8)
    pool = PoolViews(raw, raw.view(torch.bfloat16), raw.view(torch.bfloat16), geometry)
    rank, scale = tensor(64, 32, 7), tensor(64, 32, 7, dtype=torch.float32)
    tables = AdapterTables(tensor(64, 128), tensor(64, 32, 7, 3), rank, scale)
    segments = Segments(tensor(num_tokens), tensor(num_segments + 1), tensor(num_segments), max_rows=max_rows)
    num_planes = lora_shrink.num_splits(group, E, num_tokens, num_segments)
    planes = tensor(num_planes, num_tokens, 3, 64, dtype=torch.float32)
    x, y = (tensor(num_tokens, width, dtype=torch.bfloat16) for width in (4096, 6144))
    call = LoraCall(3, group, tables, segments)
    lora_shrink.lora_shrink(pool, x, call, planes, pdl=pdl)
    lora_expand.lora_expand(pool, planes, call, y, pdl=pdl)
    embedding = ModuleGroup((0,), 128256, (4096,), (0,), is_embedding=True)
    call = LoraCall(3, embedding, tables, segments)
    lora_gather.lora_gather(pool, tensor(num_tokens), call, planes[:1, :, :1])
    assert "ld.global" in gather_kernel.compiled.asm["ptx"]
    for kernel, instruction in ((shrink_kernel, "launch_dependents"), (expand_kernel, "wait")):
        ptx = kernel.compiled.asm["ptx"]
        # The shrink of a large step does not start early.
        starts_early = pdl and (kernel is expand_kernel or num_tokens == 8)
        assert kernel.compiled.metadata.launch_pdl == starts_early
        assert (f"griddepcontrol.{instruction}" in ptx) == pdl
        # A whole warp group multiplies each tile of 64 rows. Single rows need no tensor cores.
        product = {1: "fma.rn.f32", 16: "mma.sync", 64: "wgmma.mma_async"}[max_rows]
        assert product in ptx
        assert "mma" in product or "mma" not in ptx
        # Adapters are read 16 bytes at a time, into registers or directly into shared memory.
        assert re.search(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10", ptx)
        if starts_early:
            # A and the first block of B are prefetched before the wait for the previous kernel.
            waits = [match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx)]
            assert any(ptx.index("prefetch.global.L2") < wait < ptx.index(product) for wait in waits)
        # A multiprocessor's 228 KiB of shared memory fits several programs.
        assert kernel.compiled.metadata.shared <= 32 * 1024


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("out_features", [ONE, THREE], ids=["one", "three"])
@pytest.mark.parametrize("in_features", [63, 128, 500, 512], ids=lambda n: f"in-{n}")
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_every_batch_and_width_equals_dense_matrices(
    batch: Batch,
    in_features: int,
    out_features: tuple[int, ...],
    dtype: torch.dtype,
    shrink: Callable[..., None],
    expand: Callable[..., None],
    make_adapter_pool: Callable[..., Any],
) -> None:
    ranks = (*RANKS, 129, 256)
    run_case(shrink, expand, make_adapter_pool, dtype, dtype, in_features, out_features, batch, 2, ranks)


@pytest.mark.skipif(not HAS_GPU, reason="needs a pool too large for the interpreter")
def test_adapters_past_4_gib_are_read(
    shrink: Callable[..., None], expand: Callable[..., None], make_adapter_pool: Callable[..., Any]
) -> None:
    """The adapters are placed after 5 GiB of other pages."""
    dtype = torch.bfloat16
    geometry = geometry_of(dtype)
    modules = [LinearShape("m", 128, 128)]
    adapters = on_device(make_adapter_pool(modules, np.full((2, 2, 1), 16, np.int32), geometry, dtype))
    ahead = 5 * 2**30 // geometry.total_page_bytes
    raw = torch.full(
        (ahead + adapters.pool.raw.shape[0], 2, geometry.page_bytes), 0xFF, dtype=torch.uint8, device=DEVICE
    )
    raw[ahead:] = adapters.pool.raw
    adapters = replace(
        adapters,
        pool=replace(adapters.pool, raw=raw, kv=raw.view(dtype), adapter=raw.view(dtype)),
        tables=replace(adapters.tables, page_table=adapters.tables.page_table + ahead),
    )
    group, slots = ModuleGroup((0,), 128, (128,), (0,)), [0, 1, 1, 0]
    x, before = torch.randn(2, 4, 128, device=DEVICE, dtype=dtype)
    planes, y = torch.full((1, 4, 1, 16), torch.nan, device=DEVICE), before.clone()
    segments = padded_segments(slots, 2)
    call = LoraCall(1, group, adapters.tables, segments)
    shrink(adapters.pool, x, call, planes)
    expand(adapters.pool, planes, call, y)
    check(adapters, group, slots, 1, x, before, y, planes)
