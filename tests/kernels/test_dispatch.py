"""Which kernels serve a device, their threads, and that no step compiles what `warm` has compiled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from loramux.kernels import cpu_attention, cpu_fused, cpu_kv, cpu_lora
from loramux.kernels.compiled import cache_directory
from loramux.kernels.cpu import CpuKernels
from loramux.kernels.dispatch import select_kernels
from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.kernels.tables import AttentionBatch, AttentionSpec, ModuleGroup, PoolViews
from loramux.kernels.threads import set_num_threads
from loramux.kernels.warm import main, warm

COMPILED = (
    cpu_lora.shrink, cpu_lora.expand, cpu_kv.write, cpu_kv.gather, cpu_attention.decode,
    cpu_fused.rms_norm, cpu_fused.rotary, cpu_fused.silu_and_mul,
)  # fmt: skip


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    set_num_threads(before)


def test_the_cpu_has_kernels(make_poisoned_pool: Callable[..., PoolViews]) -> None:
    pool = make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32)
    assert isinstance(select_kernels(torch.device("cpu"), pool), CpuKernels)


def test_a_device_without_kernels_is_refused(make_poisoned_pool: Callable[..., PoolViews]) -> None:
    pool = make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32)
    with pytest.raises(ValueError, match="no kernels for device 'meta'"):
        select_kernels(torch.device("meta"), pool)


@pytest.mark.parametrize(
    ("geometry", "dtype", "message"),
    [
        pytest.param(PageGeometry(1, 1, 8, 4, 4, page_tokens=32), torch.float32, "32 tokens", id="page-tokens"),
        pytest.param(PageGeometry(1, 1, 12, 4, 4), torch.float32, "head_dim is 12", id="head-dim"),
        pytest.param(PageGeometry(1, 1, 8, 2, 2), torch.float16, "float16", id="dtype"),
    ],
)
def test_a_pool_that_the_cpu_cannot_read_is_refused(
    geometry: PageGeometry, dtype: torch.dtype, message: str, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    with pytest.raises(ValueError, match=message):
        CpuKernels(make_poisoned_pool(1, geometry, dtype))


@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_an_impossible_number_of_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_threads}"):
        set_num_threads(num_threads)


@pytest.mark.usefixtures("threads_restored")
def test_torch_and_numba_get_the_same_number_of_threads() -> None:
    set_num_threads(1)
    assert torch.get_num_threads() == numba.get_num_threads() == 1


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_bits_do_not_depend_on_the_number_of_threads(
    num_threads: int, make_adapter_pool: Callable[..., Any]
) -> None:
    if num_threads > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("this machine has fewer cores")
    ranks = np.array([[[16]], [[1]], [[64]]], np.int32)
    geometry = PageGeometry(1, 8, 64, 4, 4)
    adapters = make_adapter_pool([LinearShape("m", 1024, 1024)], ranks, geometry, torch.float32)
    kernels = CpuKernels(adapters.pool)
    group = ModuleGroup((0,), 1024, (1024,), (0,))
    segments = kernels.build_segments(np.array([0, 1, 2, 0, -1], np.int32))
    x = torch.randn(5, 1024)
    results = []
    for threads in (1, num_threads):
        set_num_threads(threads)
        planes, y = torch.zeros(5, 1, 64), torch.zeros(5, 1024)
        kernels.lora_shrink(x, 0, group, adapters.tables, segments, planes)
        kernels.lora_expand(planes, 0, group, adapters.tables, segments, y)
        results.append(y)
    assert torch.equal(*results)


def test_no_call_compiles_after_warm(dtype: torch.dtype, make_adapter_pool: Callable[..., Any]) -> None:
    for pool_dtype in (torch.float32, torch.bfloat16):
        warm(pool_dtype)
    before = [len(function.signatures) for function in COMPILED]
    geometry = PageGeometry(2, 2, 16, dtype.itemsize, dtype.itemsize)
    adapters = make_adapter_pool([LinearShape("m", 64, 64)] * 2, np.full((3, 2, 2), 3, np.int32), geometry, dtype)
    kernels = CpuKernels(adapters.pool)
    segments = kernels.build_segments(np.array([2, -1, 0], np.int32))
    group = ModuleGroup((0, 1), 64, (64, 64), (0, 64))
    planes, qkv = torch.zeros(3, 4, 8)[:, 1:3, :5], torch.zeros(3, 128)
    kernels.lora_shrink(torch.zeros(3, 70)[:, :64], 1, group, adapters.tables, segments, planes)
    kernels.lora_expand(planes, 1, group, adapters.tables, segments, qkv)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in qkv.split([64, 32, 32], 1))
    kernels.rotary(q, k, torch.zeros(3, 8), torch.zeros(3, 8))
    batch = AttentionBatch(
        cu_q=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([1, 2], dtype=torch.int32),
        page_table=torch.tensor([[0, 0], [1, 0]], dtype=torch.int32),
        kv_slots=torch.tensor([0, 16, 17]),
    )
    kernels.kv_write(k, v, 1, batch)
    for spec in (AttentionSpec(4, 2, 16, 1), AttentionSpec(4, 2, 16, 0.5, sliding_window=4, soft_cap=30)):
        kernels.paged_attention(q, 1, batch, spec, torch.zeros(3, 4, 16))
    kernels.rms_norm(q, torch.ones(16), 1)
    kernels.silu_and_mul(qkv[:, :64])
    assert [len(function.signatures) for function in COMPILED] == before


def test_warm_says_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert re.fullmatch(r"the CPU kernels are compiled \(\d+\.\d s\)\n", capsys.readouterr().out)


def test_compiled_code_is_kept_under_the_name_of_its_sources() -> None:
    assert Path(numba.config.CACHE_DIR) == cache_directory()
    assert list(cache_directory().rglob("*.nbi")), "a kernel that this run compiled or loaded is kept there"
