"""Compiles every CPU kernel before the first step needs one.

The first engine on a machine does this when it starts. `python -m loramux.kernels.cpu.warm` does it in advance.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from loramux.kernels.composed_linear import ReorderedLinear
from loramux.kernels.cpu.instructions.amx import has_amx
from loramux.kernels.cpu.instructions.compiled import completion_mark
from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.cpu.linear.coded_experts import make_coded_experts
from loramux.kernels.cpu.linear.experts import PackedExperts
from loramux.kernels.cpu.linear.linear import PackedLinear
from loramux.kernels.cpu.linear.quantized_layout import CODEBOOK_FORMS
from loramux.kernels.cpu.linear.quantized_linear import make_quantized_linear
from loramux.kernels.cpu.recorder import RecordingKernels, start_recording
from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.layout import LinearShape, PageGeometry, adapter_layout
from loramux.kernels.quantized import QuantizedWeight
from loramux.kernels.recording import NotRecordable
from loramux.kernels.routing_spec import RoutingSpec
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AdapterTables, AttentionBatch, AttentionSpec, LoraCall, ModuleGroup, PoolViews

HEADS, HEAD_DIM, RANK = 2, 8, 4
WIDTH = HEADS * HEAD_DIM
DTYPES = (torch.float32, torch.bfloat16)

FOR_ENGINE = "--for-engine"
"""The argument with which an engine compiles. The compilation then ends with the engine."""

PR_SET_PDEATHSIG = 1
"""See prctl(2)."""

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _TinyPool:
    """A pool with the pages of one adapter, and two pages for K and V after them."""

    geometry: PageGeometry
    kernels: CpuKernels
    call: LoraCall
    """Three rows of the adapter, which has one linear layer of WIDTH inputs and outputs."""

    @property
    def first_kv_page(self) -> int:
        return self.kernels.kv_of(HEADS, HEAD_DIM).shape[0] - 2


def warm(dtype: torch.dtype) -> None:
    """Call every kernel on a tiny pool of `dtype`. The compiled code is cached on disk."""
    warm_adapters(dtype)
    warm_base(dtype)


def warm_adapters(dtype: torch.dtype) -> None:
    """Call the kernels that read adapters, of `dtype` and as FP8 codes."""
    pool = _tiny_pool(dtype, dtype)
    kernels, call, x = pool.kernels, pool.call, torch.zeros(3, WIDTH)
    _apply_adapters(pool)
    # Adapters without trained rows compile the same code.
    none = replace(call, tables=replace(call.tables, rank=torch.zeros_like(call.tables.rank)))
    kernels.lora_affine(none, torch.zeros(3, WIDTH))
    embedding = replace(none, group=replace(call.group, is_embedding=True))
    kernels.replace_rows(torch.zeros(3, dtype=torch.int32), embedding, x.to(dtype))
    kernels.replace_columns(x, none, torch.zeros(3, WIDTH))
    _apply_adapters(_tiny_pool(dtype, torch.uint8))


def warm_base(dtype: torch.dtype) -> None:
    """Call the kernels that read no adapter, with weights, K and V of `dtype`, and with K and V in int8."""
    pool = _tiny_pool(dtype, dtype)
    kernels, batch = pool.kernels, _two_sequences(pool)
    x = torch.zeros(3, WIDTH)
    heads = x.view(3, HEADS, HEAD_DIM)
    kernels.kv_write(heads, heads, 0, batch)
    kernels.paged_attention(heads, 0, batch, AttentionSpec(HEADS, HEADS, HEAD_DIM, 1.0), torch.zeros_like(heads))
    kernels.rms_norm(x, torch.ones(WIDTH), 1e-6)
    kernels.add_rms_norm(x, torch.zeros(3, WIDTH), torch.ones(WIDTH), 1e-6)
    kernels.rotary(heads, heads.clone(), torch.ones(3, HEAD_DIM // 2), torch.zeros(3, HEAD_DIM // 2))
    kernels.silu_and_mul(x)
    kernels.gelu_and_mul(x)
    kernels.clamped_silu_and_mul(x, 1.0, 1.0)
    linears: list[Linear] = [PackedLinear(torch.zeros(WIDTH, WIDTH, dtype=dtype))]
    linears[0](x)
    routing = kernels.route(x[:, :4], RoutingSpec(num_experts=4, top_k=2, normalizes=True))
    for codebook in CODEBOOK_FORMS:
        codes = np.zeros((WIDTH, WIDTH if codebook.size == 256 else WIDTH // 2), np.uint8)
        weight = QuantizedWeight(codes=codes, codebook=codebook, scales=np.ones((WIDTH, 1), np.float32))
        for x_bits in (16, 8):
            linear = make_quantized_linear(weight, None, x_bits)
            if linear is not None:
                linears.append(linear)
                linear(x)
                # A batch of many rows uses AMX, if the CPU has it.
                linear(torch.zeros(64, WIDTH))
            experts = make_coded_experts(4, [weight] * 4, None, x_bits)
            if experts is not None:
                kernels.multiply_experts(x, experts, routing)
    y = kernels.multiply_experts(x, PackedExperts(torch.zeros(4, WIDTH, WIDTH, dtype=dtype)), routing)
    kernels.sum_experts(y, routing, x, x[:, :1])
    warm_delta(kernels, pool.geometry, batch)
    warm_program(pool, linears)
    warm_int8()


def warm_delta(kernels: CpuKernels, geometry: PageGeometry, batch: AttentionBatch) -> None:
    """Call the kernels of hybrid decoders. Both sequences of `batch` keep their states in the batch's first page."""
    spec = DeltaSpec(num_layers=1, num_k_heads=1, num_v_heads=2, k_dim=HEAD_DIM, v_dim=HEAD_DIM, conv_len=2)
    states = replace(
        batch,
        pages=batch.pages[:1].expand(spec.num_pages(geometry)).contiguous(),
        page_starts=torch.zeros_like(batch.page_starts),
    )
    x = torch.zeros(3, spec.channels)
    qkv = kernels.convolve(x, torch.zeros(spec.conv_len, spec.channels), 0, states, spec)
    kernels.delta_rule(qkv, x, torch.zeros(2, spec.num_v_heads), 0, states, spec)


def warm_program(pool: _TinyPool, linears: list[Linear]) -> None:
    """Record every operation that reads no adapter, and run the program."""
    recorder, batch = _record_two_rows(pool)
    x, angles = torch.zeros(2, WIDTH), torch.zeros(2, HEAD_DIM // 2)
    recorder.rms_norm(x, torch.ones(WIDTH), 1e-6)
    recorder.add_rms_norm(x, torch.zeros(2, WIDTH), torch.ones(WIDTH), 1e-6)
    heads = x.view(2, HEADS, HEAD_DIM)
    recorder.rotate_and_store(heads, heads.clone(), heads, angles, angles, 0, batch)
    recorder.paged_attention(heads, 0, batch, AttentionSpec(HEADS, HEADS, HEAD_DIM, 1.0), heads.clone())
    recorder.silu_and_mul(x)
    recorder.gelu_and_mul(x)
    recorder.clamped_silu_and_mul(x, 1.0, 1.0)
    # A program of many rows uses AMX, if the CPU has it.
    many_rows = start_recording(pool.kernels, 16, ())
    for linear in (*linears, ReorderedLinear(linears[-1], torch.arange(WIDTH))):
        # Products with oneDNN have no operation.
        with suppress(NotRecordable):
            recorder.multiply(linear, x)
            many_rows.multiply(linear, torch.zeros(16, WIDTH))
    recorder.finish().run((batch,), build_segments(np.zeros(2, np.int32), pool.kernels.segment_rows, RANK))


def warm_int8() -> None:
    """Call the kernels of K and V, on a pool whose K and V are int8 codes. They do not depend on the other dtypes."""
    pool = _tiny_pool(torch.int8, torch.float32)
    spec, heads = AttentionSpec(HEADS, HEADS, HEAD_DIM, 1.0), torch.zeros(3, HEADS, HEAD_DIM)
    batch = _two_sequences(pool)
    pool.kernels.kv_write(heads, heads, 0, batch)
    pool.kernels.paged_attention(heads, 0, batch, spec, torch.zeros_like(heads))
    recorder, decode = _record_two_rows(pool)
    angles = torch.zeros(2, HEAD_DIM // 2)
    q, k, v, out = torch.zeros(4, 2, HEADS, HEAD_DIM)
    recorder.rotate_and_store(q, k, v, angles, angles, 0, decode)
    recorder.paged_attention(q, 0, decode, spec, out)
    recorder.finish().run((decode,), build_segments(np.full(2, -1, np.int32), pool.kernels.segment_rows))


def _apply_adapters(pool: _TinyPool) -> None:
    """Add the adapter's product to three rows, look up rows of its embedding, and record the addition."""
    kernels, call, x = pool.kernels, pool.call, torch.zeros(3, WIDTH)
    kernels.lora_add(x, call, torch.zeros(3, WIDTH))
    # Lookups in an embedding of this shape stay within the pool. The values do not matter.
    embedding = replace(call, group=replace(call.group, is_embedding=True))
    kernels.lora_gather(torch.zeros(3, dtype=torch.int32), embedding, kernels.lora_planes(embedding, 3))
    recorder, _ = _record_two_rows(pool)
    segments = build_segments(np.zeros(2, np.int32), kernels.segment_rows, RANK)
    recorder.lora_add(torch.zeros(2, WIDTH), replace(call, segments=segments), torch.zeros(2, WIDTH))


def _two_sequences(pool: _TinyPool) -> AttentionBatch:
    """A step of one and of two tokens."""
    first = pool.first_kv_page
    return AttentionBatch(
        cu_q=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([1, 2], dtype=torch.int32),
        pages=torch.tensor([first, first + 1], dtype=torch.int32),
        page_starts=torch.tensor([0, 1], dtype=torch.int32),
        kv_slots=torch.tensor([0, 16, 17]) + 16 * first,
        max_q=2,
    )


def _record_two_rows(pool: _TinyPool) -> tuple[RecordingKernels, AttentionBatch]:
    """Begin a program for two sequences of one token each."""
    first = pool.first_kv_page
    batch = AttentionBatch(
        cu_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.ones(2, dtype=torch.int32),
        pages=torch.tensor([first, first + 1], dtype=torch.int32),
        page_starts=torch.tensor([0, 1], dtype=torch.int32),
        kv_slots=torch.tensor([16 * first, 16 * (first + 1)]),
        max_q=1,
    )
    return start_recording(pool.kernels, 2, (batch,)), batch


def _tiny_pool(kv_dtype: torch.dtype, adapter_dtype: torch.dtype) -> _TinyPool:
    is_int8 = kv_dtype is torch.int8
    geometry = PageGeometry(
        1, HEADS, HEAD_DIM, kv_dtype.itemsize, adapter_dtype.itemsize, elements_per_scale=HEAD_DIM if is_int8 else 0
    )
    layout = adapter_layout(geometry, [LinearShape("linear", WIDTH, WIDTH)], np.full((1, 1), RANK, np.int32))
    raw = torch.zeros(layout.num_pages + 2, 1, geometry.page_bytes, dtype=torch.uint8)
    scales = torch.zeros(raw.shape[0], 1, geometry.num_scales, dtype=torch.bfloat16) if is_int8 else None
    kernels = CpuKernels(PoolViews(raw, raw.view(kv_dtype), raw.view(adapter_dtype), geometry, scales))
    tables = AdapterTables(
        page_table=torch.arange(layout.num_pages, dtype=torch.int32)[None],
        off=torch.from_numpy(layout.offsets)[None],
        rank=torch.from_numpy(layout.ranks)[None],
        scale=torch.ones(1, 1, 1),
    )
    group = ModuleGroup(modules=(0,), in_features=WIDTH, out_features=(WIDTH,), out_offsets=(0,))
    segments = build_segments(np.zeros(3, np.int32), kernels.segment_rows, RANK)
    return _TinyPool(geometry, kernels, LoraCall(0, group, tables, segments))


def compile_missing() -> None:
    """Compile all kernels in processes of their own, unless they have been compiled for this CPU.

    Without this, a kernel would be compiled when a step first calls it, and that step would take a minute.
    """
    if completion_mark(has_amx()).exists():
        return
    print("compiling the CPU kernels, once for this machine, which takes one or two minutes ...", file=sys.stderr)
    sys.stderr.flush()
    command = [sys.executable, "-P", "-m", "loramux.kernels.cpu.warm", FOR_ENGINE]
    none = subprocess.DEVNULL
    if subprocess.run(command, stdin=none, stdout=none, check=False).returncode:  # noqa: S603 - our own program
        # For example, there was no memory for two more processes.
        for dtype in DTYPES:
            warm(dtype)


def main() -> None:
    if FOR_ENGINE in sys.argv:
        _end_with_parent()
    begin = time.perf_counter()
    # The sources can change while this runs. What is compiled goes into the directory that was chosen at the import.
    mark = completion_mark(has_amx())
    mark.parent.mkdir(parents=True, exist_ok=True)
    with (mark.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists():
            print("the CPU kernels have been compiled")
            return
        print("compiling the CPU kernels, which takes one or two minutes ...", flush=True)
        _compile()
        mark.touch()
    if "NUMBA_CACHE_DIR" not in os.environ:
        for path in mark.parent.parent.glob("numba-*"):
            if path != mark.parent:
                shutil.rmtree(path, ignore_errors=True)
    print(f"the CPU kernels are compiled ({time.perf_counter() - begin:.1f} s)")


def _compile() -> None:
    # numba compiles on one core. The two processes compile different kernels, because they must not add to the same
    # index of compiled code at once.
    other = multiprocessing.get_context("spawn").Process(target=_warm_all_adapters)
    other.start()
    for dtype in DTYPES:
        warm_base(dtype)
    other.join()
    if other.exitcode:
        sys.exit(f"the process that compiles the kernels of adapters ended with {other.exitcode}")


def _end_with_parent() -> None:
    """Have this process killed when the thread that started it ends, for example because of Ctrl-C."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _warm_all_adapters() -> None:
    _end_with_parent()
    for dtype in DTYPES:
        warm_adapters(dtype)


if __name__ == "__main__":
    main()
