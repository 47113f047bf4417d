"""Computes the memory and time of `ceilings`, `lora`, `codes` and `attention` with the functions that run them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu import attention as gpu_attention
from benchmarks.gpu import codes as gpu_codes
from benchmarks.gpu import lora as gpu_lora
from benchmarks.gpu.adapters import LoraCase, ResidentAdapters, batch_of
from benchmarks.gpu.attention import Attention, AttentionCase
from benchmarks.gpu.bench import CONTEXT_BYTES, FLUSH_BYTES, Bench, measuring_seconds
from benchmarks.gpu.ceilings import ELEMENTS, MATMUL_SIZE, NUM_NODES, node_ways
from benchmarks.gpu.model import Model, model_of
from benchmarks.gpu.needs import (
    CAPTURE_S,
    CHECK_OPS,
    HOST_OP_S,
    OVER_FLOOR,
    Listed,
    MetaMemory,
    Need,
    compiling,
    floor_s,
    random_s,
    shape_of,
)
from benchmarks.gpu.peers import WAYS
from benchmarks.gpu.ways import OwnPlanes, gather_bmm_way, num_stored_layers
from loramux.kernels.tables import PoolViews

GATHER_PASSES = 3
"""Passes of `gather + bmm` over its data: it reads the padded copies, then writes and rereads the gathered copies."""


def ceilings(bench: Bench) -> Iterator[Need]:
    num_bytes, flush = ELEMENTS * 4, floor_s(bench, FLUSH_BYTES)
    shape = f"float32 [{ELEMENTS}]"
    copy = OVER_FLOOR * measuring_seconds([floor_s(bench, 2 * num_bytes)], 0.0)
    made = random_s(bench, num_bytes)
    held = {"tensors": 2.0 * num_bytes, "flush": float(FLUSH_BYTES)}
    yield Need("copy", {"source, target": shape}, 1, held, copy + made)
    read = OVER_FLOOR * measuring_seconds([floor_s(bench, num_bytes)] * 2, 0.0)
    yield Need("read", {"source": shape}, 1, {"tensors": num_bytes, "flush": FLUSH_BYTES}, read, frozenset({"_read"}))
    product = OVER_FLOOR * measuring_seconds([floor_s(bench, operations=2 * MATMUL_SIZE**3)], 0.0)
    square = MATMUL_SIZE**2
    # The check converts one operand to float64.
    held = {"tensors": 3.0 * square * bench.dtype.itemsize, "check": 8.0 * square + 4 * square, "flush": FLUSH_BYTES}
    shapes = {"a, b, out": f"bfloat16 [{MATMUL_SIZE}, {MATMUL_SIZE}]"}
    yield Need("matmul", shapes, 1, held, product + random_s(bench, 12 * square))
    ways = node_ways(bench)
    nodes = [floor_s(bench, launches=NUM_NODES)] * len(ways)
    submitted = len(ways) * (2 * NUM_NODES * HOST_OP_S + CAPTURE_S)
    seconds = OVER_FLOOR * measuring_seconds(nodes, flush) + submitted
    programs = frozenset(f"_empty {way}" for way in (*ways, "second of a pair"))
    yield Need(f"{NUM_NODES} nodes", {"cell": "float32 [1]"}, len(ways), {"flush": FLUSH_BYTES}, seconds, programs)


def lora(bench: Bench) -> Iterator[Need]:
    model, wanted = model_of(bench), gpu_lora.cases(bench)
    pool = bench.pool(model.geometry(bench.dtype.itemsize), gpu_lora.shared_pool_bytes(bench, model, wanted))
    shapes = {"pool": shape_of(pool.raw)}
    # One row per peer reports its loaded version.
    yield Need("every case", shapes, len(WAYS), {"pool": pool.raw.nbytes}, random_s(bench, pool.raw.nbytes))
    for case in wanted:
        yield _lora_case(bench, model, pool, case)
    yield compiling(CONTEXT_BYTES + gpu_lora.WARM_POOL_BYTES)


def _lora_case(bench: Bench, model: Model, pool: PoolViews, case: LoraCase) -> Need:
    try:
        adapters = ResidentAdapters(bench, model, pool, case.ranks, shares_pages=False)
    except MemoryError as error:
        return Need(str(case), {}, 0, {"pool": pool.raw.nbytes}, 0.0, problem=str(error))
    memory = MetaMemory()
    with memory:
        batch = batch_of(bench, model, case)
        planes, outputs = OwnPlanes(adapters, batch), batch.outputs()
        rows = memory.restart()
        num_stored = num_stored_layers(adapters)
        # Every stored layer takes as much memory as the first.
        gather = gather_bmm_way(adapters, batch, 1)
        copies = (memory.live - rows) * num_stored
        gather(0, outputs)
        transient = memory.peak - memory.live
        own = gpu_lora.own_ways(bench, adapters, batch, planes)
        launched = Listed()
        with launched.within(bench):
            for way in own.values():
                way.launch(0, outputs)
    layers = gpu_lora.checked_layers(model, num_stored)
    num_ways, num_copies = len(own) + 1 + len(WAYS), 1 + len(WAYS)
    changes = 8 * case.num_rows * sum(group.total_out for group in model.groups)
    held = {
        "pool": pool.raw.nbytes,
        "rows": rows + num_ways * sum(y.nbytes for y in outputs),
        "copies": num_copies * copies,
        # Counted twice: in torch's cache after the first run, and in the graph's memory.
        "transient": 2 * transient,
        "reference": len(layers) * changes,
        "flush": FLUSH_BYTES,
    }
    padded = adapters.weight_bytes() * adapters.max_rank * case.num_adapters // sum(case.ranks)
    activations, num_launches = batch.activation_bytes(), gpu_lora.launches_of(model)
    one = floor_s(bench, adapters.weight_bytes() + activations, launches=num_launches)
    num_gathers = model.num_layers * sum(2 + 3 * len(group.modules) for group in model.groups)
    peer = floor_s(bench, padded + activations, launches=num_launches)
    ways = [one] * len(own) + [floor_s(bench, GATHER_PASSES * padded + activations, launches=num_gathers)]
    ways += [peer] * len(WAYS)
    flush = floor_s(bench, FLUSH_BYTES)
    seconds = OVER_FLOOR * measuring_seconds(ways, flush)
    seconds += OVER_FLOOR * measuring_seconds([floor_s(bench, launches=num_launches)] * len(own), flush)
    seconds += num_ways * (2 * num_launches * HOST_OP_S + CAPTURE_S) + num_copies * floor_s(bench, 4 * copies)
    seconds += len(layers) * len(model.modules) * case.num_adapters * CHECK_OPS * HOST_OP_S
    own_programs = frozenset(launched.programs)
    programs = own_programs | {f"{peer} {program}" for peer in WAYS for program in own_programs}
    shapes = {
        "x": ", ".join(shape_of(x) for x in batch.xs),
        "page table": shape_of(adapters.tables.page_table),
        "planes": ", ".join(shape_of(one) for one in planes.by_group),
        "stored layers": str(num_stored),
    }
    return Need(str(case), shapes, num_ways, held, seconds, programs, num_launches=launched.num_launches)


def codes(bench: Bench) -> Iterator[Need]:
    for case in gpu_codes.cases(bench):
        ways = gpu_codes.ways_of(bench, case)
        weights = float(sum(way.weight_bytes for way in ways.values()))
        programs: set[str] = set()
        num_rows = num_launches = 0
        seconds = random_s(bench, weights) + len(ways) * gpu_codes.HOST_S
        for rows in case.rows:
            used = [way for way in ways.values() if rows >= way.min_rows]
            num_rows += len(used)
            x = torch.empty(rows, case.in_features, dtype=bench.dtype, device=bench.device)
            launched = Listed()
            with launched.within(bench):
                for way in used:
                    way.linear(x)
            programs |= launched.programs
            num_launches += launched.num_launches
            parts = [case.floor_parts(way.weight_bytes, rows, bench.dtype.itemsize) for way in used]
            floors = [floor_s(bench, num_bytes, operations, launches=1) for num_bytes, operations in parts]
            seconds += OVER_FLOOR * measuring_seconds(floors, floor_s(bench, FLUSH_BYTES)) + len(used) * CAPTURE_S
        held = {"weights": weights, "flush": float(FLUSH_BYTES)}
        shapes = {"weight": f"[{case.out_features}, {case.in_features}]", "rows": ", ".join(map(str, case.rows))}
        yield Need(str(case), shapes, num_rows, held, seconds, frozenset(programs), num_launches=num_launches)
    yield compiling(CONTEXT_BYTES + weights)


def attention(bench: Bench) -> Iterator[Need]:
    model, wanted = model_of(bench), gpu_attention.cases(bench)
    allowed, itemsize = gpu_attention.allowed_bytes(bench), bench.dtype.itemsize
    num_bytes = max(gpu_attention.pool_bytes_of(model, case, itemsize, allowed) for case in wanted)
    pool = bench.pool(model.geometry(itemsize), num_bytes)
    shapes = {"pool": shape_of(pool.raw)}
    yield Need("every case", shapes, 0, {"pool": pool.raw.nbytes}, random_s(bench, pool.raw.nbytes))
    for case in wanted:
        yield _attention_case(bench, model, case, allowed, pool.raw.nbytes)
    yield compiling(CONTEXT_BYTES + gpu_attention.WARM_POOL_BYTES)


def _attention_case(bench: Bench, model: Model, case: AttentionCase, allowed: int, pool_bytes: int) -> Need:
    itemsize = bench.dtype.itemsize
    num_layers = gpu_attention.num_stored(model, case, itemsize, allowed)
    if num_layers < 1:
        return Need(str(case), {}, 0, {"pool": pool_bytes}, 0.0, problem="the pool cannot hold a single layer")
    memory = MetaMemory()
    with memory:
        pool = bench.pool(
            model.geometry(itemsize, num_layers), gpu_attention.pool_bytes_of(model, case, itemsize, allowed)
        )
        memory.restart()
        attention = Attention(bench, model, case, pool)
        rows = memory.restart()
        _, num_dense = gpu_attention.sdpa_way(bench, attention)
        codes = gpu_attention.with_codes(bench, attention) if gpu_attention.has_codes(bench, case) else None
        launched = Listed()
        with launched.within(bench):
            attention.launch(0)
            ways = {} if case.is_decode else gpu_attention.contiguous_ways(bench, attention)[0]
            if codes is not None:
                codes.launch(0)
        num_ways = 2 + len(ways) + (codes is not None)
        copies = memory.live - rows
        # SDPA's own outputs, in addition to the memory for gathering pages.
        transient = memory.peak - memory.live + attention.out.nbytes
    # The check keeps one sequence at a time in memory: K and V in float64, and three copies of the scores.
    heads = model.num_kv_heads
    checked = case.context * 8 * (2 * heads * model.head_dim + 3 * model.num_heads * gpu_attention.SAMPLED_ROWS)
    held = {
        "pool": pool_bytes, "rows": rows, "copies": copies, "transient": 2 * transient, "check": checked,
        "flush": FLUSH_BYTES,
    }  # fmt: skip
    moved = case.kv_bytes(model, itemsize) + 2 * attention.q.nbytes
    layer = floor_s(bench, moved, case.operations(model), launches=launched.num_launches)
    repeated = layer * model.num_layers
    seconds = OVER_FLOOR * measuring_seconds([repeated, layer] * num_ways, floor_s(bench, FLUSH_BYTES))
    seconds += 2 * num_ways * CAPTURE_S + num_ways * 2 * case.num_sequences * CHECK_OPS * HOST_OP_S
    seconds += floor_s(bench, 3 * copies) + num_ways * OVER_FLOOR * floor_s(bench, 9 * moved)
    shapes = {
        "q, out": shape_of(attention.q),
        "pages": shape_of(attention.pages),
        "stored layers": f"{num_layers}, SDPA {num_dense}",
    }
    programs, num_launches = frozenset(launched.programs), launched.num_launches
    return Need(str(case), shapes, num_ways, held, seconds, programs, num_launches=num_launches)
