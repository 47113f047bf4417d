from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from loramux.kernels.cpu import attention as cpu_attention
from loramux.kernels.cpu import delta as cpu_delta
from loramux.kernels.cpu import fused as cpu_fused
from loramux.kernels.cpu import kv as cpu_kv
from loramux.kernels.cpu import routing as cpu_routing
from loramux.kernels.cpu.instructions import amx, avx512_bf16, rounded_rows
from loramux.kernels.cpu.instructions.compiled import cache_directory, code_directory
from loramux.kernels.cpu.instructions.threads import set_num_threads
from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.cpu.linear import coded_experts, expert_panels, quantized_amx, quantized_linear
from loramux.kernels.cpu.linear import experts as cpu_experts
from loramux.kernels.cpu.linear import linear as cpu_linear
from loramux.kernels.cpu.lora import gather as cpu_gather
from loramux.kernels.cpu.lora import low_rank as cpu_low_rank
from loramux.kernels.cpu.lora import trained_rows as cpu_trained_rows
from loramux.kernels.cpu.warm import warm
from loramux.kernels.dispatch import KernelShapes, select_kernels
from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.kernels.reference.kernels import ReferenceKernels
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AttentionSpec, LoraCall, ModuleGroup, PoolViews
from tests.kernels.cpu.every_request import call_every_kernel
from tests.kernels.gpu.interpreted import TRITON_MODULES

COMPILED = (
    cpu_low_rank.low_rank, cpu_gather.gather, cpu_trained_rows.replace_rows, cpu_trained_rows.store_columns,
    cpu_kv.write, cpu_attention.attend,
    cpu_linear.multiply_panels, avx512_bf16.round_rows, avx512_bf16.multiply_pair_panels, amx.multiply_tile_panels,
    quantized_linear.multiply_codes, quantized_amx.multiply_code_tiles, rounded_rows.round_blocks,
    cpu_fused.rms_norm, cpu_fused.add_rms_norm, cpu_fused.rotary, cpu_fused.silu_and_mul, cpu_fused.gelu_and_mul,
    cpu_fused.clamped_silu_and_mul, cpu_routing.route, cpu_experts.sum_experts, cpu_delta.convolve,
    cpu_delta.delta_rule, expert_panels.multiply_pair_panels, expert_panels.multiply_float_panels,
    coded_experts.multiply_expert_codes,
)  # fmt: skip


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    set_num_threads(before)


GEOMETRY = PageGeometry(num_layers=1, num_kv_heads=2, head_dim=16, kv_itemsize=4, adapter_itemsize=4)
SHAPES = KernelShapes((ModuleGroup((0,), 64, (64,), (0,)),), (AttentionSpec(4, 2, 16, 0.25),))


def test_cpu_kernels_are_selected(make_poisoned_pool: Callable[..., PoolViews]) -> None:
    pool = make_poisoned_pool(1, GEOMETRY, torch.float32)
    assert isinstance(select_kernels(torch.device("cpu"), pool, SHAPES), CpuKernels)


def test_cpu_kernels_work_without_triton() -> None:
    """Run this check in a separate process, where nothing has imported Triton yet."""
    program = """
import sys
sys.modules["triton"] = None
import torch
from loramux.kernels.dispatch import KernelShapes, select_kernels
from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import PoolViews
raw = torch.zeros(1, 1, 1024, dtype=torch.uint8)
pool = PoolViews(raw, raw.view(torch.float32), raw.view(torch.float32), PageGeometry(1, 1, 8, 4, 4))
print(type(select_kernels(torch.device("cpu"), pool, KernelShapes((), ()))).__name__)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "CpuKernels\n", done.stderr


def test_a_device_without_kernels_is_refused(make_poisoned_pool: Callable[..., PoolViews]) -> None:
    pool = make_poisoned_pool(1, GEOMETRY, torch.float32)
    with pytest.raises(ValueError, match="no kernels for device 'meta'"):
        select_kernels(torch.device("meta"), pool, SHAPES)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that claims to be an Ampere GPU. No kernel is launched on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return torch.device("cuda")


def test_gpu_kernels_are_selected(cuda: torch.device, make_poisoned_pool: Callable[..., PoolViews]) -> None:
    kernels = select_kernels(cuda, make_poisoned_pool(1, GEOMETRY, torch.float32), SHAPES, pdl=True)
    assert type(kernels).__name__ == "GpuKernels"
    assert kernels.segment_rows == 16


def test_a_missing_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        select_kernels(torch.device("cuda"), make_poisoned_pool(1, GEOMETRY, torch.float32), SHAPES)


def test_an_old_gpu_is_refused(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=re.escape("capability 7.5; the kernels need 8.0")):
        select_kernels(cuda, make_poisoned_pool(1, GEOMETRY, torch.float32), SHAPES)


def test_a_gpu_without_triton_is_refused(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    for name in TRITON_MODULES:
        monkeypatch.delitem(sys.modules, f"loramux.kernels.gpu.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="need triton"):
        select_kernels(cuda, make_poisoned_pool(1, GEOMETRY, torch.float32), SHAPES)


OTHER_SPECS = {
    "uneven-heads": (AttentionSpec(5, 2, 16, 1.0), "cannot share 2 KV heads"),
    "too-many-heads": (AttentionSpec(258, 2, 16, 1.0), "at most 128 can share one"),
    "other-heads": (AttentionSpec(4, 4, 16, 1.0), "does not divide the pages'"),
    "window-0": (AttentionSpec(4, 2, 16, 1.0, sliding_window=0), "sliding_window is 0; it must be at least 1"),
}


@pytest.mark.parametrize(("spec", "message"), OTHER_SPECS.values(), ids=OTHER_SPECS.keys())
def test_unsupported_attention_on_a_gpu_is_refused(
    spec: AttentionSpec, message: str, cuda: torch.device, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    """The layout is refused even if only the last layer uses it."""
    shapes = KernelShapes(SHAPES.groups, (*SHAPES.attention, spec))
    with pytest.raises(ValueError, match=message):
        select_kernels(cuda, make_poisoned_pool(1, GEOMETRY, torch.float32), shapes)


OTHER_PAGES = {
    "page-tokens": (PageGeometry(1, 2, 16, 4, 4, page_tokens=32), torch.float32, torch.float32, "pages of 16"),
    "head-dim": (PageGeometry(1, 2, 12, 4, 4), torch.float32, torch.float32, "multiples of 8 from 8 to 512"),
    "kv-dtype": (PageGeometry(1, 2, 16, 8, 4), torch.float64, torch.float32, "K and V are torch.float64"),
    "adapter-dtype": (PageGeometry(1, 2, 16, 4, 8), torch.float32, torch.float64, "adapters are torch.float64"),
    "chunk": (PageGeometry(1, 1, 8, 4, 128), torch.float32, torch.float32, "chunks of 8; .* at least 16"),
}


@pytest.mark.parametrize(("geometry", "kv_dtype", "adapter_dtype", "message"), OTHER_PAGES.values(), ids=OTHER_PAGES)
def test_unsupported_pool_on_a_gpu_is_refused(
    geometry: PageGeometry, kv_dtype: torch.dtype, adapter_dtype: torch.dtype, message: str, cuda: torch.device
) -> None:
    raw = torch.zeros(1, 1, geometry.page_bytes, dtype=torch.uint8)
    pool = PoolViews(raw, raw.view(kv_dtype), raw.view(adapter_dtype), geometry)
    spec = AttentionSpec(4, geometry.num_kv_heads, geometry.head_dim, 1.0)
    with pytest.raises(ValueError, match=message):
        select_kernels(cuda, pool, KernelShapes(SHAPES.groups, (spec,)))


@pytest.mark.parametrize(
    ("geometry", "dtype", "message"),
    [
        pytest.param(PageGeometry(1, 1, 8, 4, 4, page_tokens=32), torch.float32, "32 tokens", id="page-tokens"),
        pytest.param(PageGeometry(1, 1, 12, 4, 4), torch.float32, "head_dim is 12", id="head-dim"),
        pytest.param(PageGeometry(1, 1, 8, 2, 2), torch.float16, "float16", id="dtype"),
    ],
)
def test_unsupported_pool_on_the_cpu_is_refused(
    geometry: PageGeometry, dtype: torch.dtype, message: str, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    with pytest.raises(ValueError, match=message):
        CpuKernels(make_poisoned_pool(1, geometry, dtype))


@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_invalid_number_of_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_threads}"):
        set_num_threads(num_threads)


@pytest.mark.usefixtures("threads_restored")
def test_torch_and_numba_get_the_same_number_of_threads() -> None:
    set_num_threads(1)
    assert torch.get_num_threads() == numba.get_num_threads() == 1


SHARES = {
    "whole segments": (64, 64, 64, 64),
    "of one segment each": (64, 64),
    "the first without work": (0, 0, 64, 64, 64, 64),
    "the last without work": (64, 64, 64, 64, 0, 0),
    "nearly even": (64, 61, 60, 64),
    "pieces of segments": (16, 1, 64),
    "pieces of one": (128,),
}


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("ranks", SHARES.values(), ids=SHARES)
def test_results_do_not_depend_on_how_threads_share_the_work(
    ranks: tuple[int, ...], make_adapter_pool: Callable[..., Any]
) -> None:
    """Results are bitwise equal for any number of threads and match the reference within rounding."""
    num_rows, most = len(ranks) + 1, max(ranks)
    table = np.array(ranks, np.int32).reshape(-1, 1, 1)
    adapters = make_adapter_pool([LinearShape("m", 1024, 1024)], table, PageGeometry(1, 8, 64, 4, 4), torch.float32)
    kernels, group = CpuKernels(adapters.pool), ModuleGroup((0,), 1024, (1024,), (0,))
    segments = build_segments(np.arange(-1, len(ranks), dtype=np.int32), kernels.segment_rows, most)
    x, expected = torch.randn(num_rows, 1024), torch.zeros(num_rows, 1024)
    call = LoraCall(0, group, adapters.tables, segments)
    ReferenceKernels(adapters.pool).lora_add(x, call, expected)
    results = []
    for threads in range(1, min(3, numba.config.NUMBA_NUM_THREADS) + 1):  # type: ignore[attr-defined]
        set_num_threads(threads)
        # Poison the planes, so that no thread can reuse the results of an earlier call.
        kernels.lora_planes(call, num_rows).fill_(torch.nan)
        y = torch.zeros(num_rows, 1024)
        kernels.lora_add(x, call, y)
        results.append(y)
    torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-3)
    assert all(torch.equal(y, results[0]) for y in results)


def test_nothing_compiles_after_warm(dtype: torch.dtype) -> None:
    for pool_dtype in (torch.float32, torch.bfloat16):
        warm(pool_dtype)
    before = [len(function.signatures) for function in COMPILED]
    call_every_kernel(dtype)
    assert [len(function.signatures) for function in COMPILED] == before


def test_directory_of_compiled_code_is_always_named_after_the_sources(tmp_path: Path) -> None:
    """Otherwise, a kernel whose helper changed in another file would run as an earlier version compiled it."""
    file = tmp_path / "file"
    file.touch()
    own, unwritable, caches = tmp_path / "package" / "numba-0f", file / "numba-0f", tmp_path / "caches"
    assert code_directory(own, None, caches) == own
    assert code_directory(unwritable, None, caches) == caches / "numba-0f"
    for chosen in (tmp_path / "chosen", tmp_path / "chosen" / "numba-0f"):
        assert code_directory(own, str(chosen), caches) == tmp_path / "chosen" / "numba-0f"


def test_compiled_code_is_stored_in_the_cache_directory() -> None:
    assert Path(numba.config.CACHE_DIR) == cache_directory()  # type: ignore[attr-defined]
    assert list(cache_directory().rglob("*.nbi")), "this run's kernels are cached there"
