"""Records a step's kernels as a program, with the interface of the kernels that it records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loramux.kernels.cpu.instructions.arrays import rows_of
from loramux.kernels.cpu.kernels import NO_WINDOW, CpuKernels, scale_words
from loramux.kernels.cpu.programs.operation import Operation
from loramux.kernels.cpu.programs.program import Program
from loramux.kernels.cpu.programs.step_words import GROUP_WORDS
from loramux.kernels.cpu.programs.tape import Tape
from loramux.kernels.cpu.recorded import lora, rows
from loramux.kernels.cpu.recorded.attention import ATTEND
from loramux.kernels.cpu.recorded.products import record_product
from loramux.kernels.layout import MAX_RANK
from loramux.kernels.recording import NotRecordable
from loramux.kernels.tables import AttentionBatch, AttentionSpec, LoraCall


class _OnlyViews(TorchDispatchMode):
    """Refuses every operation of torch except views, because a program would not repeat it.

    While `is_off`, all operations are allowed, for the recorder itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_off = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """By default, torch imports its compiler at the first operation, which takes an engine a second and 100 MB."""
        return False

    @contextmanager
    def off(self) -> Iterator[None]:
        self.is_off = True
        try:
            yield
        finally:
            self.is_off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_off or func._schema.name == "aten::detach":
            return func(*args, **(kwargs or {}))
        found = func(*args, **(kwargs or {})) if func.is_view else None
        made = found if isinstance(found, list | tuple) else [found]
        # In inference mode, reshape and flatten arrive as views, but they copy if they must.
        if all(isinstance(one, torch.Tensor) and _share_storage(one, args[0]) for one in made):
            return found
        raise NotRecordable(f"the operation {func}")


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class RecordingKernels:
    """Records calls of `CpuKernels` on a tape. The tensors that it returns have values only when the program runs.

    Raises NotRecordable for kernels that have no operation. `attention` are the batches of the step's groups of layers,
    which have one row per sequence.
    """

    def __init__(self, kernels: CpuKernels, tape: Tape, attention: tuple[AttentionBatch, ...]) -> None:
        self._kernels = kernels
        self._tape = tape
        self._groups = {id(batch): GROUP_WORDS * group for group, batch in enumerate(attention)}
        self._mode = _OnlyViews()

    def __getattr__(self, name: str) -> NoReturn:
        raise NotRecordable(f"the kernel {name}")

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._mode:
            yield

    def finish(self) -> Program:
        return self._tape.finish()

    def begin_layer(self, layer: int) -> None:
        self._tape.begin_layer(layer)

    def multiply(self, linear: Any, x: torch.Tensor) -> torch.Tensor:
        with self._mode.off():
            self._tape.own(x)
            return record_product(self._tape, linear, x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size, num_rows = x.shape[-1], x.shape[0]
        num_vectors = x.numel() // size // num_rows
        with self._mode.off():
            assert x.stride(-1) == 1
            assert num_vectors == 1 or x.stride(-2) == size
            out = self._tape.rows(num_vectors * size)
            self._tape.for_each_row(
                rows.norm,
                (x.data_ptr(), 4 * x.stride(0), out.data_ptr(), 4 * out.stride(0), _floats(weight), num_vectors, size),
                (float(eps),),
            )
            self._tape.own(x, weight)
            return out.view(x.shape)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        with self._mode.off():
            out = self._tape.rows(x.shape[1])
            words = (*_steps(x), *_steps(residual), *_steps(out), _floats(weight), x.shape[1])
            self._tape.for_each_row(rows.add_norm, words, (float(eps),))
            self._tape.own(x, residual, weight)
            return out

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
    ) -> None:
        with self._mode.off():
            angles = (_floats(cos), _floats(sin), cos.shape[1])
            self._tape.own(q, k, v, cos, sin)
            for heads in (q, k):
                if heads is not None:
                    self._tape.for_each_row(rows.rotate, (*_steps(heads), heads.shape[1], heads.shape[2], *angles))
            if k is not None and v is not None:
                num_heads, head_dim = k.shape[1:]
                pool, scales = self._kernels.kv_of(num_heads, head_dim), self._kernels.scales_of(num_heads, head_dim)
                words = (*_steps(k), *_steps(v), pool.ctypes.data, *pool.shape, layer, num_heads, head_dim)
                words = (*words, self._groups[id(batch)])
                if scales is None:
                    self._tape.for_each_row(rows.STORE[pool.itemsize], words)
                else:
                    self._tape.for_each_row(rows.store_codes, (*words, scales.ctypes.data, scales.shape[2]))
                self._tape.own(pool, scales)

    def max_gathered_pages(self, spec: AttentionSpec) -> int:
        return 0

    def paged_attention(
        self,
        q: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        spec: AttentionSpec,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        with self._mode.off():
            heads = spec.num_kv_heads, spec.head_dim
            pool, scales = self._kernels.kv_of(*heads), self._kernels.scales_of(*heads)
            window = NO_WINDOW if spec.sliding_window is None else spec.sliding_window
            words = (
                *_steps(q), *_steps(out), pool.ctypes.data, *pool.shape, layer, spec.num_heads // spec.num_kv_heads,
                spec.num_kv_heads, spec.head_dim, window, 0 if sinks is None else _floats(sinks),
                self._groups[id(batch)], *scale_words(scales),
            )  # fmt: skip
            num_tasks = self._tape.num_rows * spec.num_kv_heads
            self._tape.in_tasks(
                ATTEND[pool.itemsize], num_tasks, words, (float(spec.scale), float(spec.soft_cap or 0.0))
            )
            self._tape.own(q, sinks, out, pool, scales)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gate(rows.silu, gate_up)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gate(rows.gelu, gate_up)

    def clamped_silu_and_mul(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        return self._gate(rows.clamped_silu, gate_up, (float(alpha), float(limit)))

    def lora_add(self, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """Add the products of any adapters that a step lists."""
        with self._mode.off():
            if call.segments.experts is not None:
                raise NotRecordable("adapters of experts")
            group, tables, tape = call.group, call.tables, self._tape
            pool, plan = self._kernels.adapter_pool, self._kernels.plan(group)
            planes = tape.scratch(4 * len(group.modules) * MAX_RANK).view(torch.float32)
            num_tasks = tape.num_threads if tape.num_threads == 1 else 2 * tape.num_threads
            num_slots, num_layers, num_modules = tables.rank.shape
            words = (
                planes.data_ptr(), planes.numel() // tape.num_rows, MAX_RANK, pool.ctypes.data, *pool.shape,
                call.layer, num_tasks, plan.ctypes.data, len(plan), tables.page_table.shape[1],
                num_slots, num_layers, num_modules,
                *(one.data_ptr() for one in (tables.page_table, tables.off, tables.rank, tables.scale)),
            )  # fmt: skip
            element = pool.dtype.name
            tape.in_tasks(lora.shrink(element), num_tasks, (*rows_of(x), *words))
            tape.in_tasks(lora.expand(element), num_tasks, (*rows_of(y), *words))
            tape.own(x, y, tables, plan, pool)

    def _gate(self, operation: Operation, gate_up: torch.Tensor, doubles: tuple[float, ...] = ()) -> torch.Tensor:
        with self._mode.off():
            out = self._tape.rows(gate_up.shape[1] // 2)
            words = (*_steps(gate_up), *_steps(out), out.shape[1])
            self._tape.for_each_row(operation, words, doubles)
            self._tape.own(gate_up)
            return out


def start_recording(kernels: object, num_rows: int, attention: tuple[AttentionBatch, ...]) -> RecordingKernels:
    """Begin a program of CPU kernels for `num_rows` rows."""
    assert isinstance(kernels, CpuKernels)
    return RecordingKernels(kernels, Tape(num_rows, torch.get_num_threads(), kernels.buffers), attention)


def _steps(x: torch.Tensor) -> tuple[int, int]:
    """Address of the first row, and bytes between rows."""
    address, stride = rows_of(x)
    return address, 4 * stride


def _floats(tensor: torch.Tensor) -> int:
    assert tensor.dtype is torch.float32
    assert tensor.is_contiguous()
    return tensor.data_ptr()
