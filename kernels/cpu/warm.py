"""Compiles every CPU kernel ahead of time, so no server has to: `python -m loramux.kernels.cpu.warm`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from loramux.kernels.cpu.instructions.compiled import cache_directory
from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.cpu.linear.coded_experts import make_coded_experts
from loramux.kernels.cpu.linear.experts import PackedExperts
from loramux.kernels.cpu.linear.linear import PackedLinear
from loramux.kernels.cpu.linear.quantized_layout import CODEBOOK_FORMS
from loramux.kernels.cpu.linear.quantized_linear import make_quantized_linear
from loramux.kernels.cpu.recorder import start_recording
from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.layout import LinearShape, PageGeometry, adapter_layout
from loramux.kernels.quantized import QuantizedWeight
from loramux.kernels.recording import NotRecordable
from loramux.kernels.routing_spec import RoutingSpec
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AdapterTables, AttentionBatch, AttentionSpec, LoraCall, ModuleGroup, PoolViews

HEADS, HEAD_DIM, RANK = 2, 8, 4


def warm(dtype: torch.dtype) -> None:
    """Call every kernel on a tiny pool of `dtype`. The compiled code is cached on disk."""
    geometry = PageGeometry(1, HEADS, HEAD_DIM, dtype.itemsize, dtype.itemsize)
    width = HEADS * HEAD_DIM
    layout = adapter_layout(geometry, [LinearShape("linear", width, width)], np.full((1, 1), RANK, np.int32))
    num_pages = layout.num_pages + 2
    raw = torch.zeros(num_pages, 1, geometry.page_bytes, dtype=torch.uint8)
    kernels = CpuKernels(PoolViews(raw, raw.view(dtype), raw.view(dtype), geometry))

    tables = AdapterTables(
        page_table=torch.arange(layout.num_pages, dtype=torch.int32)[None],
        off=torch.from_numpy(layout.offsets)[None],
        rank=torch.from_numpy(layout.ranks)[None],
        scale=torch.ones(1, 1, 1),
    )
    group = ModuleGroup(modules=(0,), in_features=width, out_features=(width,), out_offsets=(0,))
    batch = AttentionBatch(
        cu_q=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([1, 2], dtype=torch.int32),
        pages=torch.arange(num_pages - 2, num_pages, dtype=torch.int32),
        page_starts=torch.tensor([0, 1], dtype=torch.int32),
        kv_slots=torch.tensor([0, 16, 17]) + 16 * (num_pages - 2),
        max_q=2,
    )
    x = torch.zeros(3, width)
    heads = x.view(3, HEADS, HEAD_DIM)
    segments = build_segments(np.zeros(3, np.int32), kernels.segment_rows, RANK)
    call = LoraCall(0, group, tables, segments)
    kernels.lora_add(x, call, torch.zeros(3, width))
    # Lookups in an embedding of this shape stay within the pool. The values do not matter.
    embedding = replace(call, group=replace(group, is_embedding=True))
    kernels.lora_gather(torch.zeros(3, dtype=torch.int32), embedding, kernels.lora_planes(embedding, 3))
    # Adapters without trained rows compile the same code.
    none = replace(call, tables=replace(tables, rank=torch.zeros_like(tables.rank)))
    kernels.lora_affine(none, torch.zeros(3, width))
    kernels.replace_rows(torch.zeros(3, dtype=torch.int32), replace(none, group=embedding.group), x.to(dtype))
    kernels.replace_columns(x, none, torch.zeros(3, width))
    kernels.kv_write(heads, heads, 0, batch)
    kernels.paged_attention(heads, 0, batch, AttentionSpec(HEADS, HEADS, HEAD_DIM, 1.0), torch.zeros_like(heads))
    kernels.rms_norm(x, torch.ones(width), 1e-6)
    kernels.add_rms_norm(x, torch.zeros(3, width), torch.ones(width), 1e-6)
    kernels.rotary(heads, heads.clone(), torch.ones(3, HEAD_DIM // 2), torch.zeros(3, HEAD_DIM // 2))
    kernels.silu_and_mul(x)
    kernels.gelu_and_mul(x)
    kernels.clamped_silu_and_mul(x, 1.0, 1.0)
    PackedLinear(torch.zeros(width, width, dtype=dtype))(x)
    routing = kernels.route(x[:, :4], RoutingSpec(num_experts=4, top_k=2, normalizes=True))
    linears: list[Linear] = [PackedLinear(torch.zeros(width, width, dtype=dtype))]
    for codebook in CODEBOOK_FORMS:
        codes = np.zeros((width, width if codebook.size == 256 else width // 2), np.uint8)
        weight = QuantizedWeight(codes=codes, codebook=codebook, scales=np.ones((width, 1), np.float32))
        for x_bits in (16, 8):
            linear = make_quantized_linear(weight, None, x_bits)
            if linear is not None:
                linears.append(linear)
                linear(x)
                # A batch of many rows uses AMX, if the CPU has it.
                linear(torch.zeros(64, width))
            experts = make_coded_experts(4, [weight] * 4, None, x_bits)
            if experts is not None:
                kernels.multiply_experts(x, experts, routing)
    y = kernels.multiply_experts(x, PackedExperts(torch.zeros(4, width, width, dtype=dtype)), routing)
    kernels.sum_experts(y, routing, x, x[:, :1])
    warm_delta(kernels, geometry, batch)
    warm_program(kernels, call, linears)
    warm_fp8(raw, dtype, call, linears)
    warm_int8(num_pages, batch)


Linear = Callable[[torch.Tensor], torch.Tensor]


def warm_program(kernels: CpuKernels, call: LoraCall, linears: list[Linear]) -> None:
    """Record every operation for two rows, and run the program. The pool's last two pages contain K and V."""
    batch = decode_of_two(kernels)
    recorder = start_recording(kernels, 2, (batch,))
    width = call.group.in_features
    x, angles = torch.zeros(2, width), torch.zeros(2, HEAD_DIM // 2)
    recorder.rms_norm(x, torch.ones(width), 1e-6)
    recorder.add_rms_norm(x, torch.zeros(2, width), torch.ones(width), 1e-6)
    heads = x.view(2, HEADS, HEAD_DIM)
    recorder.rotate_and_store(heads, heads.clone(), heads, angles, angles, 0, batch)
    recorder.paged_attention(heads, 0, batch, AttentionSpec(HEADS, HEADS, HEAD_DIM, 1.0), heads.clone())
    recorder.silu_and_mul(x)
    recorder.gelu_and_mul(x)
    recorder.clamped_silu_and_mul(x, 1.0, 1.0)
    for linear in linears:
        # Products with AMX have no operation.
        with suppress(NotRecordable):
            recorder.multiply(linear, x)
    segments = build_segments(np.zeros(2, np.int32), kernels.segment_rows, RANK)
    recorder.lora_add(x, replace(call, segments=segments), torch.zeros(2, width))
    recorder.finish().run((batch,), segments)


def decode_of_two(kernels: CpuKernels) -> AttentionBatch:
    """A step of two sequences of one token, whose K and V are in the pool's last two pages."""
    last = kernels.kv_of(HEADS, HEAD_DIM).shape[0] - 1
    return AttentionBatch(
        cu_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.ones(2, dtype=torch.int32),
        pages=torch.tensor([last - 1, last], dtype=torch.int32),
        page_starts=torch.tensor([0, 1], dtype=torch.int32),
        kv_slots=torch.tensor([16 * (last - 1), 16 * last]),
        max_q=1,
    )


def warm_fp8(raw: torch.Tensor, kv_dtype: torch.dtype, call: LoraCall, linears: list[Linear]) -> None:
    """Call the kernels that read adapters, on a pool whose adapters are FP8 codes."""
    geometry = PageGeometry(1, HEADS, HEAD_DIM, kv_dtype.itemsize, 1)
    kernels = CpuKernels(PoolViews(raw, raw.view(kv_dtype), raw, geometry))
    x = torch.zeros(3, HEADS * HEAD_DIM)
    kernels.lora_add(x, call, torch.zeros_like(x))
    embedding = replace(call, group=replace(call.group, is_embedding=True))
    kernels.lora_gather(torch.zeros(3, dtype=torch.int32), embedding, kernels.lora_planes(embedding, 3))
    warm_program(kernels, call, linears)


def warm_int8(num_pages: int, batch: AttentionBatch) -> None:
    """Call the kernels of K and V, on a pool whose K and V are int8 codes. They do not depend on any other dtype."""
    geometry = PageGeometry(1, HEADS, HEAD_DIM, 1, 4, elements_per_scale=HEAD_DIM)
    raw = torch.zeros(num_pages, 1, geometry.page_bytes, dtype=torch.uint8)
    scales = torch.zeros(num_pages, 1, geometry.num_scales, dtype=torch.bfloat16)
    kernels = CpuKernels(PoolViews(raw, raw.view(torch.int8), raw.view(torch.float32), geometry, scales))
    spec = AttentionSpec(HEADS, HEADS, HEAD_DIM, 1.0)
    heads = torch.zeros(3, HEADS, HEAD_DIM)
    kernels.kv_write(heads, heads, 0, batch)
    kernels.paged_attention(heads, 0, batch, spec, torch.zeros_like(heads))
    decode, angles = decode_of_two(kernels), torch.zeros(2, HEAD_DIM // 2)
    recorder = start_recording(kernels, 2, (decode,))
    q, k, v, out = torch.zeros(4, 2, HEADS, HEAD_DIM)
    recorder.rotate_and_store(q, k, v, angles, angles, 0, decode)
    recorder.paged_attention(q, 0, decode, spec, out)
    recorder.finish().run((decode,), build_segments(np.full(2, -1, np.int32), kernels.segment_rows))


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


def main() -> None:
    begin = time.perf_counter()
    print("compiling the CPU kernels, which takes one or two minutes unless it has been done before ...", flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        warm(dtype)
    current = cache_directory()
    for path in current.parent.glob("numba-*"):
        if path != current:
            shutil.rmtree(path, ignore_errors=True)
    print(f"the CPU kernels are compiled ({time.perf_counter() - begin:.1f} s)")


if __name__ == "__main__":
    main()
