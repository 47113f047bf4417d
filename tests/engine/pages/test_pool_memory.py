from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loramux.engine.device.accelerator import DeviceMemory, HostAccelerator
from loramux.engine.pages.pool_memory import MIN_RESERVE_BYTES, allocate_pool, copy_page, pool_bytes_of
from loramux.engine.pages.pool_size import DEFAULT_BYTES
from loramux.engine.protocol.errors import PoolTooSmall
from loramux.kernels.layout import PageGeometry
from tests.engine.device.fake_gpu import LLAMA, UnlaunchedProgram, fake_driver, start_engine

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("free", "total", "kept"),
    [
        # Llama-3.1-8B takes 15 GiB in bfloat16.
        pytest.param(24 * GIB - 15 * GIB - 700 * MIB, 24 * GIB, 2 * GIB, id="8b-on-24-gb"),
        pytest.param(80 * GIB - 15 * GIB - 700 * MIB, 80 * GIB, int(6.4 * GIB), id="8b-on-80-gb"),
    ],
)
def test_room_for_graphs_stays_free(free: int, total: int, kept: int) -> None:
    assert pool_bytes_of(None, DeviceMemory(free, total)) == pytest.approx(free - kept, abs=1)
    assert pool_bytes_of(5 * GIB, DeviceMemory(free, total)) == 5 * GIB


def test_device_sharing_host_memory_uses_the_default_pool_size() -> None:
    assert pool_bytes_of(None, None) == DEFAULT_BYTES


@pytest.mark.parametrize("free", [0, MIN_RESERVE_BYTES])
def test_model_that_leaves_no_room_is_refused_with_a_remedy(free: int) -> None:
    with pytest.raises(PoolTooSmall, match=r"GiB of the GPU's 16\.0 GiB free.* use a larger GPU"):
        pool_bytes_of(None, DeviceMemory(free, 16 * GIB))


def test_a_pool_larger_than_the_memory_of_the_machine_is_refused_with_a_remedy() -> None:
    geometry = PageGeometry(num_layers=2, num_kv_heads=2, head_dim=16, kv_itemsize=2, adapter_itemsize=2)
    dtypes = {"kv_dtype": torch.bfloat16, "adapter_dtype": torch.bfloat16}
    with pytest.raises(PoolTooSmall, match="does not fit next to the model: lower pool_bytes"):
        allocate_pool(geometry, 1 << 60, device=torch.device("cpu"), **dtypes)


def test_a_page_is_copied_on_one_thread_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = PageGeometry(num_layers=2, num_kv_heads=2, head_dim=16, kv_itemsize=2, adapter_itemsize=2)
    pool_bytes = 3 * geometry.pool_page_bytes
    views = allocate_pool(geometry, pool_bytes, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    for page in range(3):
        views.raw[page] = page
    # torch copies large tensors on all its threads.
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    copy_page(views, 2, 0)
    assert [one.unique().tolist() for one in views.raw] == [[2], [1], [2]]


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")
def test_pool_leaves_memory_for_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import compiler

    class Card(HostAccelerator):
        """A 24 GiB GPU with 2 GiB and 96 MiB free after loading the weights and releasing temporary copies."""

        free = MIN_RESERVE_BYTES + 32 * MIB

        def release_unused(self) -> None:
            self.free += 64 * MIB

        def memory(self) -> DeviceMemory:
            return DeviceMemory(self.free, 24 * GIB)

    card = Card()

    def compile_ahead(launch: Callable[[], None], num_processes: int) -> None:
        assert card.free == MIN_RESERVE_BYTES + 96 * MIB
        launch()
        # Torch keeps the activations' memory after the step.
        card.free -= 80 * MIB

    monkeypatch.setattr(compiler, "compile", lambda *arguments, **options: UnlaunchedProgram())
    with fake_driver(90):
        assembled = start_engine(tmp_path, LLAMA, compile_ahead, card, pool_bytes=None, max_sequences=1)
    page_bytes = assembled.views.geometry.total_page_bytes
    assert assembled.ready.num_pages == 16 * MIB // page_bytes
    assembled.adapters.close()
