"""Calls of every CPU kernel, with everything that changes the types of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from loramux.kernels.composed_linear import JoinedLinear, ReorderedLinear
from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.cpu.linear.coded_experts import make_coded_experts
from loramux.kernels.cpu.linear.experts import PackedExperts
from loramux.kernels.cpu.linear.linear import PackedLinear
from loramux.kernels.cpu.linear.quantized_linear import make_quantized_linear
from loramux.kernels.cpu.recorder import start_recording
from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.kernels.recording import NotRecordable
from loramux.kernels.routing_spec import RoutingSpec
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AttentionBatch, AttentionSpec, LoraCall, ModuleGroup
from tests.kernels.cpu.codebooks import CODEBOOKS, random_weight
from tests.kernels.pools import adapter_pool, poisoned_int8_pool


def call_every_kernel(dtype: torch.dtype) -> None:
    """Call the kernels as a step does, with a pool and weights of `dtype` and with quantised weights."""
    geometry = PageGeometry(2, 2, 16, dtype.itemsize, dtype.itemsize)
    adapters = adapter_pool([LinearShape("m", 64, 64)] * 2, np.full((3, 2, 2), 3, np.int32), geometry, dtype)
    kernels = CpuKernels(adapters.pool)
    segments = build_segments(np.array([2, -1, 0], np.int32), kernels.segment_rows)
    group = ModuleGroup((0, 1), 64, (64, 64), (0, 64))
    planes, qkv = torch.zeros(3, 4, 8)[:, 1:3, :5], torch.zeros(3, 128)
    x = torch.zeros(3, 70)[:, :64]
    call = LoraCall(1, group, adapters.tables, segments)
    kernels.lora_shrink(x, call, planes)
    kernels.lora_expand(planes, call, qkv)
    kernels.lora_add(x, call, qkv)
    kernels.lora_affine(replace(call, group=ModuleGroup((1,), 64, (64,), (0,))), qkv[:, 64:])
    embedding = ModuleGroup((1,), 64, (64,), (0,), is_embedding=True)
    tokens = torch.zeros(3, dtype=torch.int32)
    kernels.lora_gather(tokens, LoraCall(1, embedding, adapters.tables, segments), planes)
    flat = replace(adapters.tables, off=torch.zeros(3, 1, 2, 2).int(), rank=torch.ones(3, 1, 2).int())
    kernels.outer.lora_gather(tokens, LoraCall(0, embedding, flat, segments), planes)
    trained = LoraCall(0, embedding, replace(flat, rank=torch.zeros(3, 1, 2).int()), segments)
    kernels.outer.replace_rows(tokens, trained, torch.zeros(3, 64, dtype=dtype))
    kernels.outer.replace_columns(x, replace(trained, group=group), qkv)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in qkv.split([64, 32, 32], 1))
    kernels.rotary(q, k, torch.zeros(3, 8), torch.zeros(3, 8))
    batch = AttentionBatch(
        cu_q=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([1, 2], dtype=torch.int32),
        pages=torch.tensor([0, 1], dtype=torch.int32),
        page_starts=torch.tensor([0, 1], dtype=torch.int32),
        kv_slots=torch.tensor([0, 16, 17]),
        max_q=2,
    )
    kernels.kv_write(k, v, 1, batch)
    for spec in (AttentionSpec(4, 2, 16, 1), AttentionSpec(4, 2, 16, 0.5, sliding_window=4, soft_cap=30)):
        for sinks in (None, torch.zeros(4)):
            kernels.paged_attention(q, 1, batch, spec, torch.zeros(3, 4, 16), sinks)
    kernels.rms_norm(q, torch.ones(16), 1)
    kernels.add_rms_norm(qkv[:, :64], torch.zeros(3, 70)[:, :64], torch.ones(64), 1)
    kernels.silu_and_mul(qkv[:, :64])
    kernels.gelu_and_mul(qkv[:, :64])
    kernels.clamped_silu_and_mul(qkv[:, :64], 2, 7)
    routing = kernels.route(qkv[:, :5], RoutingSpec(5, 3, False))
    kernels.route(qkv[:, :4], RoutingSpec(4, 2, True, has_sigmoid=True, num_groups=2, scale=2), torch.zeros(4))
    kernels.sum_experts(torch.zeros(9, 64), routing, None, None)
    kernels.sum_experts(torch.zeros(9, 64), routing, qkv[:, 64:], None)
    kernels.sum_experts(torch.zeros(9, 64), routing, qkv[:, 64:], qkv[:, 5:6])
    pairs = kernels.adapter_pairs(routing, torch.tensor([2, -1, 0], dtype=torch.int32), segments)
    for rows in (x, torch.zeros(9, 64)):
        kernels.lora_add(rows, replace(call, segments=pairs), torch.zeros(9, 128))
    weight = torch.zeros(70, 64, dtype=dtype)
    for bias in (None, torch.zeros(70, dtype=dtype)):
        for num_rows in (0, 3, 100):
            PackedLinear(weight, bias)(torch.zeros(num_rows, 64))
    for expert_bias in (None, torch.zeros(5, 70, dtype=dtype)):
        kernels.multiply_experts(x, PackedExperts([weight] * 5, expert_bias), routing)
    linears: list[Callable[[torch.Tensor], torch.Tensor]] = [PackedLinear(weight)]
    for codebook, shift in CODEBOOKS.values():
        coded = random_weight(codebook, shift, 70, 64, 32)
        for x_bits in (16, 8):
            linear = make_quantized_linear(coded, None, x_bits)
            assert linear is None or len(linear(x)) + len(linear(torch.zeros(41, 64))) == 44
            linears += [] if linear is None else [linear]
            experts = make_coded_experts(5, [coded] * 5, None, x_bits)
            assert experts is None or len(kernels.multiply_experts(x, experts, routing)) == 9
    spec = DeltaSpec(num_layers=1, num_k_heads=1, num_v_heads=2, k_dim=12, v_dim=8, conv_len=3)
    mixed = kernels.convolve(qkv[:, : spec.channels], torch.zeros(3, spec.channels), 0, batch, spec)  # type: ignore[attr-defined]
    kernels.delta_rule(mixed, qkv[:, :4], torch.zeros(2, 2), 0, batch, spec)
    record_every_operation(kernels, call, linears)
    call_with_fp8(dtype, linears)
    call_with_int8(batch)


def call_with_int8(batch: AttentionBatch) -> None:
    """Call what reads or writes K and V with a pool of int8 codes."""
    kernels = CpuKernels(poisoned_int8_pool(3, PageGeometry(2, 2, 16, 1, 4, elements_per_scale=16)))
    q, k, v = (part.unflatten(1, (-1, 16)) for part in torch.zeros(3, 128).split([64, 32, 32], 1))
    kernels.kv_write(k, v, 1, batch)
    for sinks in (None, torch.zeros(4)):
        kernels.paged_attention(q, 1, batch, AttentionSpec(4, 2, 16, 0.5), torch.zeros(3, 4, 16), sinks)
    decode = decode_of_two()
    recorder, angles = start_recording(kernels, 2, (decode,)), torch.zeros(2, 8)
    recorder.rotate_and_store(q[:2], k[:2], v[:2], angles, angles, 1, decode)
    recorder.paged_attention(q[:2], 1, decode, AttentionSpec(4, 2, 16, 0.5), torch.zeros(2, 4, 16))
    recorder.finish().run((decode,), build_segments(np.full(2, -1, np.int32), kernels.segment_rows))


def call_with_fp8(kv_dtype: torch.dtype, linears: list[Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Call what reads adapters with a pool of FP8 codes. Its adapters have neither affines nor trained rows."""
    geometry = PageGeometry(2, 2, 16, kv_dtype.itemsize, 1)
    adapters = adapter_pool([LinearShape("m", 64, 64)] * 2, np.full((3, 2, 2), 3, np.int32), geometry, torch.uint8)
    kernels = CpuKernels(replace(adapters.pool, kv=adapters.pool.raw.view(kv_dtype)))
    segments = build_segments(np.array([2, -1, 0], np.int32), kernels.segment_rows)
    call = LoraCall(1, ModuleGroup((0, 1), 64, (64, 64), (0, 64)), adapters.tables, segments)
    kernels.lora_add(torch.zeros(3, 64), call, torch.zeros(3, 128))
    embedding = ModuleGroup((1,), 64, (64,), (0,), is_embedding=True)
    flat = replace(adapters.tables, off=torch.zeros(3, 1, 2, 3).int(), rank=torch.ones(3, 1, 2).int())
    tokens, planes = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 1, 5)
    kernels.outer.lora_gather(tokens, LoraCall(0, embedding, flat, segments), planes)
    record_every_operation(kernels, call, linears)


def decode_of_two() -> AttentionBatch:
    return AttentionBatch(
        cu_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.tensor([1, 2], dtype=torch.int32),
        pages=torch.tensor([0, 1], dtype=torch.int32),
        page_starts=torch.tensor([0, 1], dtype=torch.int32),
        kv_slots=torch.tensor([0, 17]),
        max_q=1,
    )


def record_every_operation(
    kernels: CpuKernels, call: LoraCall, linears: list[Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    """Record every kernel of a decode step of two rows, and products of many rows, and run both programs."""
    batch = decode_of_two()
    recorder = start_recording(kernels, 2, (batch,))
    x, angles = torch.zeros(2, 64), torch.zeros(2, 8)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in torch.zeros(2, 128).split([64, 32, 32], 1))
    recorder.add_rms_norm(recorder.rms_norm(q, torch.ones(16), 1).flatten(1), x, torch.ones(64), 1)
    recorder.rotate_and_store(q, k, v, angles, angles, 1, batch)
    recorder.rotate_and_store(q, None, None, angles, angles, 1, batch)
    recorder.paged_attention(q, 1, batch, AttentionSpec(4, 2, 16, 0.5, 4, 30), torch.zeros(2, 4, 16), torch.zeros(4))
    recorder.clamped_silu_and_mul(recorder.gelu_and_mul(recorder.silu_and_mul(x)), 2, 7)
    many_rows = start_recording(kernels, 32, ())
    for linear in (*linears, ReorderedLinear(linears[-1], torch.arange(64)), JoinedLinear(linears[-1:])):
        with suppress(NotRecordable):
            recorder.multiply(linear, x)
            many_rows.multiply(linear, torch.zeros(32, 64))
    segments = build_segments(np.array([2, 0], np.int32), kernels.segment_rows)
    recorder.lora_add(x, replace(call, segments=segments), torch.zeros(2, 128))
    recorder.finish().run((batch,), segments)
    many_rows.finish().run((), build_segments(np.full(32, -1, np.int32), kernels.segment_rows))
