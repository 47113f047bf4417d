from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loramux.engine.parallel import process_groups
from loramux.engine.parallel.process_groups import GlooGroup, NcclGroup, ProcessGroup, new_group
from tests.kernels.gpu.interpreted import HAS_GPU

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="this machine has no GPU")


def in_all_workers(directory: Path, size: int, run: Callable[[ProcessGroup], torch.Tensor]) -> list[torch.Tensor]:
    """What `run` returns in each worker, which is a thread of this process."""
    found: dict[int, torch.Tensor] = {}
    # A worker that closes its connections while another one still connects would end that one's `join`.
    all_done = threading.Barrier(size, timeout=60)

    def work(number: int) -> None:
        group = new_group("cpu", directory / "meeting", size, number)
        group.join()
        found[number] = run(group)
        all_done.wait()
        group.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(size)]


def test_only_gpus_use_nccl(tmp_path: Path) -> None:
    for device, kind in (("cpu", GlooGroup), ("cuda", NcclGroup)):
        group = new_group(device, tmp_path / "meeting", 4, 3)
        assert (type(group), group.size, group.worker) == (kind, 4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_are_added_up(dtype: torch.dtype, tmp_path: Path) -> None:
    # The columns of the transposed tensor are not contiguous.
    found = in_all_workers(
        tmp_path, 3, lambda group: group.sum(torch.arange(6, dtype=dtype).view(3, 2).T + group.worker)
    )
    for one in found:
        assert one.tolist() == [[3, 9, 15], [6, 12, 18]]


def test_columns_are_joined_in_the_order_of_workers(tmp_path: Path) -> None:
    found = in_all_workers(
        tmp_path, 3, lambda group: group.join_columns(torch.tensor([[0.0, 1.0], [10.0, 11.0]]) + 2 * group.worker)
    )
    for one in found:
        assert one.tolist() == [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]


def test_worker_0_gives_its_tokens_to_the_others(tmp_path: Path) -> None:
    def share(group: ProcessGroup) -> torch.Tensor:
        tokens = torch.full((4,), group.worker + 5, dtype=torch.int32)
        group.broadcast(tokens[:3])
        return tokens

    assert [one.tolist() for one in in_all_workers(tmp_path, 2, share)] == [[5, 5, 5, 5], [5, 5, 5, 6]]


def test_exchanges_without_rows_need_no_other_worker(tmp_path: Path) -> None:
    def exchange(group: ProcessGroup) -> torch.Tensor:
        if group.worker == 0:
            group.broadcast(torch.zeros(0))
            group.sum(torch.zeros(0, 3))
        return group.join_columns(torch.zeros(0, 3))

    assert [one.shape for one in in_all_workers(tmp_path, 2, exchange)] == [(0, 6), (0, 6)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_before_the_workers_are_connected_an_exchange_has_the_right_shape(device: str, tmp_path: Path) -> None:
    group = new_group(device, tmp_path / "meeting", 2, 0)
    y = torch.ones(3, 5)
    group.broadcast(y)
    assert (group.sum(y).shape, group.join_columns(y).shape) == ((3, 5), (3, 10))


def test_exchanges_that_return_nothing_to_wait_for_are_complete() -> None:
    """As NCCL's are on the current stream. Before, it has written to the tensors that it was given."""

    def allreduce(tensors: list[torch.Tensor], options: Any) -> None:
        assert not options.asyncOp
        tensors[0].mul_(2)

    def allgather(parts: torch.Tensor, y: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp
        parts.copy_(torch.cat([y, y + 1]))

    def broadcast(tensors: list[torch.Tensor], options: Any) -> None:
        assert not options.asyncOp
        tensors[0].fill_(7)

    group = new_group("cuda", Path("meeting"), 2, 1)
    group._group = SimpleNamespace(allreduce=allreduce, _allgather_base=allgather, broadcast=broadcast)
    y = torch.tensor([[1.0, 2.0]])
    assert group.sum(y.clone()).tolist() == [[2, 4]]
    assert group.join_columns(y).tolist() == [[1, 2, 2, 3]]
    group.broadcast(y)
    assert y.tolist() == [[7, 7]]


def test_no_thread_of_nccl_looks_for_the_file_through_which_workers_met(monkeypatch: pytest.MonkeyPatch) -> None:
    variables: dict[str, str] = {}
    monkeypatch.setattr(process_groups.os, "environ", variables)  # type: ignore[attr-defined]

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *arguments: Any) -> None:
            self.variables = dict(variables)

    monkeypatch.setattr(process_groups._distributed, "ProcessGroupNCCL", Nccl, raising=False)
    group = new_group("cuda", Path("meeting"), 2, 1)
    assert group._connected(None).variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"


@needs_gpu
@pytest.mark.filterwarnings("ignore:.*destroy_process_group")
def test_nccl_exchanges_are_captured_and_replayed(tmp_path: Path) -> None:
    """With one worker, whose exchanges change nothing. More workers need more GPUs."""
    from loramux.engine.device.cuda import CudaAccelerator

    accelerator = CudaAccelerator(torch.device("cuda", 0))
    group = new_group("cuda", tmp_path / "meeting", 1, 0)
    group.join()
    x, out = torch.zeros(64, 96, device="cuda"), torch.zeros(64, 96, device="cuda")
    tokens = torch.arange(64, dtype=torch.int32, device="cuda")

    def step() -> None:
        out.copy_(group.join_columns(group.sum(x * 2)))
        group.broadcast(tokens)

    step()
    # Work that the group's own thread still watches must not disturb the capture.
    replays = [accelerator.capture(step) for _ in range(3)]
    for number, replay in enumerate(replays, 1):
        x.fill_(number)
        # Between replays, as in a prompt, exchanges are submitted one by one.
        assert int(group.sum(torch.full((1,), number, device="cuda"))) == number
        replay()
        torch.cuda.synchronize()
        assert out.unique().tolist() == [2 * number]
        assert tokens.tolist() == list(range(64))
    group.close()
