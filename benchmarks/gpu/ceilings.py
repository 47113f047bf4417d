"""The card's limits: copy and read bandwidth, bfloat16 matrix multiplication, and the time of a graph node."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from benchmarks.gpu.bench import Bench, Ceilings, Row, require_close

NUM_NODES = 256
"""Number of kernels in a graph, equal to the number of LoRA launches in a step of Llama-3.1-8B."""

READ_BLOCK = 4096
ELEMENTS = 1 << 30
"""Number of float32 elements to copy and read."""

MATMUL_SIZE = 8192


@triton.jit
def _read(source: tl.tensor, sums: tl.tensor, num_blocks: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Each program sums every `num_programs`-th block of `source`, which has fewer than 2**31 elements."""
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        total += tl.load(source + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit
def _empty(cell: tl.tensor, WAITS: tl.constexpr, LAUNCHES: tl.constexpr) -> None:
    """An empty kernel, optionally with the signals for overlapping launches."""
    if LAUNCHES:
        tl.extra.cuda.gdc_launch_dependents()
    if WAITS:
        tl.extra.cuda.gdc_wait()


def run(bench: Bench) -> Iterator[Row]:
    rows = []
    elements = 1 << 14 if bench.is_tiny else ELEMENTS
    source = torch.randn(elements, device=bench.device)
    rows.append(_copy(bench, source))
    rows.append(_read_only(bench, source))
    del source
    bench.release()
    rows.append(_matmul(bench))
    yield from rows
    if bench.is_timed:
        nodes = _nodes(bench)
        yield from nodes
        rows += nodes
        figures = {row.way: row.figures for row in rows}
        bench.ceilings = Ceilings(
            copy=figures["copy"]["tb_s"] * 1e12,
            read=figures["read"]["tb_s"] * 1e12,
            matmul=figures["matmul"]["tflop_s"] * 1e12,
            node=figures["empty node"]["node_us"] / 1e6,
        )


def _copy(bench: Bench, source: torch.Tensor) -> Row:
    target = torch.full_like(source, torch.nan)
    target.copy_(source)
    require_close(target[-(1 << 12) :], source[-(1 << 12) :], tolerance=0.0)
    case = f"{source.nbytes / 1e9:.2f} GB, bytes read and written"
    if not bench.is_timed:
        return Row(case, "copy")
    seconds = bench.time({"copy": lambda: target.copy_(source)}, is_cold=False)["copy"]
    return Row(case, "copy", {"tb_s": 2 * source.nbytes / seconds / 1e12})


def _read_only(bench: Bench, source: torch.Tensor) -> Row:
    num_programs = 4 if bench.is_tiny else 8 * bench.num_processors
    sums = torch.full((num_programs,), torch.nan, device=bench.device)

    def read() -> None:
        _read[(num_programs,)](source, sums, source.numel() // READ_BLOCK, BLOCK=READ_BLOCK, num_warps=8)

    read()
    # The sum of random numbers is near zero, so the error is relative to the sum's standard deviation.
    spread = torch.full((1,), source.numel() ** 0.5, device=bench.device)
    require_close(sums.double().sum(), source.sum(dtype=torch.float64), spread, 1e-3)
    case = f"{source.nbytes / 1e9:.2f} GB, read only"
    if not bench.is_timed:
        return Row(case, "read")
    ways: dict[str, Callable[[], object]] = {"triton": read, "torch": lambda: source.sum()}
    return Row(case, "read", {"tb_s": source.nbytes / min(bench.time(ways, is_cold=False).values()) / 1e12})


def _matmul(bench: Bench) -> Row:
    size = 64 if bench.is_tiny else MATMUL_SIZE
    a, b = (torch.randn(size, size, device=bench.device).to(bench.dtype) for _ in range(2))
    out = torch.full_like(a, torch.nan)
    torch.mm(a, b, out=out)
    require_close(out[:64], a[:64].double() @ b.double())
    case = f"{size} x {size} x {size}, random {str(bench.dtype).removeprefix('torch.')}"
    if not bench.is_timed:
        return Row(case, "matmul")
    seconds = bench.time({"matmul": lambda: torch.mm(a, b, out=out)}, is_cold=False)["matmul"]
    return Row(case, "matmul", {"tflop_s": 2 * size**3 / seconds / 1e12})


def node_ways(bench: Bench) -> tuple[str, ...]:
    ways = ("empty node", "empty node, all overlapping", "empty node, overlapping pairs")
    return ways if bench.has_pdl else ways[:1]


def _nodes(bench: Bench) -> list[Row]:
    """Graphs of empty kernels: without overlap, all overlapping, and overlapping in pairs, as shrink and expand do."""
    cell = torch.zeros(1, device=bench.device)

    def plain() -> None:
        for _ in range(NUM_NODES):
            _empty[(1,)](cell, WAITS=False, LAUNCHES=False, num_warps=4)

    def overlapping() -> None:
        for _ in range(NUM_NODES):
            _empty[(1,)](cell, WAITS=True, LAUNCHES=True, num_warps=4, launch_pdl=True)

    def pairs() -> None:
        for _ in range(NUM_NODES // 2):
            _empty[(1,)](cell, WAITS=False, LAUNCHES=True, num_warps=4)
            _empty[(1,)](cell, WAITS=True, LAUNCHES=False, num_warps=4, launch_pdl=True)

    launches = dict(zip(node_ways(bench), (plain, overlapping, pairs), strict=False))
    replays = {}
    for name, launch in launches.items():
        launch()
        replays[name] = bench.capture(launch)
    return [
        Row(f"graph of {NUM_NODES} kernels of one program", name, {"node_us": seconds / NUM_NODES * 1e6})
        for name, seconds in bench.time(replays, is_cold=False).items()
    ]
