"""Counts the bytes that a launch moves, from its arguments and the sizes of its tensors.

`least` counts every byte once, as if programs read all shared data from a cache. `asked` counts all loads and stores of
all programs. Lookups in tables and page lists take a few bytes per program and are not counted. Tokens choose experts
uniformly at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.table_step import RecordedStep, TableCase, TorchLaunch, TritonLaunch
from loramux.kernels.layout import SCALE_BYTES
from loramux.kernels.segments import group_rows

FLOAT = 4


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes read and written: `least` counts each byte once, and `asked` counts every load and store."""

    least: float
    asked: float

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.least + other.least, self.asked + other.asked)


def once(num_bytes: float) -> Bytes:
    return Bytes(num_bytes, num_bytes)


def bytes_of(launch: TritonLaunch | TorchLaunch, step: RecordedStep) -> Bytes:
    if isinstance(launch, TorchLaunch):
        return _torch_bytes(launch)
    return _FORMULAS[launch.name](launch, step)


def _torch_bytes(launch: TorchLaunch) -> Bytes:
    written = sum(one.nbytes for one in launch.outputs)
    if launch.name in ("index", "embedding"):
        # Only the selected rows of the table are read.
        return once(2 * written + launch.inputs[1].nbytes)
    if launch.name == "copy_":
        return once(2 * written)
    return once(written + sum(one.nbytes for one in launch.inputs))


def _norm(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    row = a["SIZE"] * (a["x_ptr"].itemsize + a["out_ptr"].itemsize)
    if a["HAS_RESIDUAL"]:
        row += 2 * a["SIZE"] * a["residual_ptr"].itemsize
    rows, weight = a["num_rows"] * row, a["weight_ptr"].nbytes
    return Bytes(rows + weight, rows + weight * launch.grid[0])


def _rotate_and_store(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    q = a["NUM_Q"] * 2 * a["HALF"] * 2 * a["q_ptr"].itemsize
    kv = 2 * a["NUM_KV"] * a["HEAD_DIM"] * (a["k_ptr"].itemsize + a["kv_ptr"].itemsize)
    if a["NUM_SCALES"]:
        kv += 2 * a["NUM_KV"] * SCALE_BYTES
    if a["ROTATES_K"]:
        kv += a["NUM_KV"] * 2 * a["HALF"] * a["k_ptr"].itemsize
    return once(step.batch.num_tokens * (q + kv + 2 * a["HALF"] * FLOAT))


def _gate(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    return once(launch.grid[0] * a["SIZE"] * (2 * a["gate_up_ptr"].itemsize + a["out_ptr"].itemsize))


@dataclass(frozen=True, slots=True)
class _Lora:
    """Counts for a shrink or expand: rows with an adapter, tiles of up to ROWS of these rows, and distinct adapters."""

    num_rows: int
    num_tiles: int
    num_slots: int

    @staticmethod
    def of(launch: TritonLaunch, step: RecordedStep) -> _Lora:
        keys = step.batch.slots
        if launch.arguments["EXPERT_STRIDE"]:
            # Each pair of an adapter and an expert has its own matrices.
            chosen = _chosen(step)
            keys = np.where(keys[:, None] >= 0, keys[:, None] * step.num_experts + chosen, -1).reshape(-1)
        rows, _, slots = group_rows(keys.astype(np.int32), launch.arguments["ROWS"])
        return _Lora(len(rows), len(slots), len(set(slots.tolist())))


def _chosen(step: RecordedStep) -> npt.NDArray[np.int64]:
    """The experts of each token, `[num_tokens, top_k]`, drawn at random."""
    experts = step.case.experts
    assert experts is not None
    draws = np.random.default_rng(0).random((step.batch.num_tokens, experts.num_experts))
    return draws.argsort(axis=1)[:, : experts.top_k]


def _pairs_by_expert(step: RecordedStep) -> npt.NDArray[np.int64]:
    """Number of tokens that choose each expert, `[num_experts]`."""
    return np.bincount(_chosen(step).reshape(-1), minlength=step.num_experts)


def _ranks(launch: TritonLaunch, case: TableCase) -> list[int]:
    return [case.rank if module in case.modules else 0 for module in launch.arguments["MODULES"]]


def _shrink(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a, ranks = launch.arguments, _ranks(launch, step.case)
    lora = _Lora.of(launch, step)
    weights = sum(ranks) * a["IN"] * a["pool"].itemsize
    x = lora.num_rows * a["IN"] * a["x"].itemsize
    passes = sum(math.ceil(rank / a["BLOCK_R"]) for rank in ranks)
    planes = lora.num_rows * sum(ranks) * a["NUM_SPLITS"] * FLOAT
    least_x = x / a["PAIRS_PER_ROW"] if passes else 0
    return Bytes(lora.num_slots * weights + least_x + planes, lora.num_tiles * weights + passes * x + planes)


def _expand(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a, ranks = launch.arguments, _ranks(launch, step.case)
    lora = _Lora.of(launch, step)
    pairs = list(zip(ranks, a["OUT"], strict=True))
    weights = sum(rank * out for rank, out in pairs) * a["pool"].itemsize
    y = lora.num_rows * sum(out for rank, out in pairs if rank) * 2 * a["y"].itemsize
    if a["WRITES"]:
        y = a["y"].nbytes
    planes = lora.num_rows * a["NUM_SPLITS"] * FLOAT
    blocks = sum(rank * math.ceil(out / a["BLOCK_N"]) for rank, out in pairs)
    return Bytes(lora.num_slots * weights + y + planes * sum(ranks), lora.num_tiles * weights + y + planes * blocks)


def _lora_linear(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a, ranks = launch.arguments, _ranks(launch, step.case)
    slots = step.batch.slots[step.batch.slots >= 0]
    num_rows, itemsize, (num_blocks, num_splits, *_) = a["num_rows"], a["x"].itemsize, launch.grid
    b = len(set(slots.tolist())) * sum(rank * out for rank, out in zip(ranks, a["OUT"], strict=True))
    planes = len(slots) * sum(ranks) * a["NUM_PLANES"] * FLOAT
    x, y = num_rows * a["IN"] * itemsize, num_rows * a["TOTAL_OUT"] * itemsize
    # Partial sums are written once and read once.
    sums = 2 * num_splits * num_rows * a["TOTAL_OUT"] * FLOAT if num_splits > 1 else 0
    moved = a["TOTAL_OUT"] * a["IN"] * itemsize + b * a["pool"].itemsize + y + sums
    planes_asked = planes / a["NUM_MODULES"] * num_blocks * num_splits
    return Bytes(moved + x + planes, moved + num_blocks * x + planes_asked)


def _route(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    return once(step.batch.num_tokens * (a["NUM_EXPERTS"] * a["logits_ptr"].itemsize + a["TOP_K"] * 2 * FLOAT))


def _group(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    num_pairs, num_experts = _chosen(step).size, step.num_experts
    written = (num_pairs + num_experts) * FLOAT
    # Each program reads the experts of all pairs twice.
    return Bytes(num_pairs * FLOAT + written, 2 * num_experts * num_pairs * FLOAT + written)


def _list_pairs(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    chosen = _chosen(step)
    written = (chosen.size + 3 * launch.arguments["segment_slots_ptr"].shape[0]) * FLOAT
    read = (2 * chosen.size + chosen.shape[0]) * FLOAT
    # A pair takes six lookups. An expert's program reads its own pairs and the pairs of all experts before it.
    lookups = int(_pairs_by_expert(step).cumsum().sum()) * 6 * FLOAT
    return Bytes(read + written, lookups + written)


def _multiply(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    return _product(a, _pairs_by_expert(step), a["IN"] * a["OUT"] * a["weight_ptr"].itemsize)


def shared_bytes(launch: TritonLaunch, step: RecordedStep, num_resident: int) -> float:
    """Bytes that a product of experts (`_multiply`) moves if programs that run at the same time share their loads.

    Programs run in waves of `num_resident`, in the order of the grid. No load is shared between waves.
    """
    a = launch.arguments
    counts = _pairs_by_expert(step)
    expert, first_row = np.array(
        [(expert, row) for expert, count in enumerate(counts) for row in range(0, count, a["ROWS"])]
    ).T
    num_rows = np.minimum(a["ROWS"], counts[expert] - first_row)
    num_columns = math.ceil(a["OUT"] / a["BLOCK_N"])
    program = np.arange(len(expert) * num_columns)
    wave, tile, column = program // num_resident, program // num_columns, program % num_columns
    width = np.minimum(a["BLOCK_N"], a["OUT"] - column * a["BLOCK_N"])
    weights = {(w, e, c): size for w, e, c, size in zip(wave, expert[tile], column, width, strict=True)}
    rows = {(w, t): size for w, t, size in zip(wave, tile, num_rows[tile], strict=True)}
    loaded = (sum(weights.values()) + sum(rows.values())) * a["IN"]
    return float((loaded + counts.sum() * a["OUT"]) * a["x_ptr"].itemsize)


def _multiply_codes(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    counts = _pairs_by_expert(step) if a["HAS_ROUTING"] else np.array([a["num_rows"]])
    weights = _code_bytes(a) / len(a["codes_ptr"])
    return _product(a, counts, weights, launch.grid[2] * FLOAT / a["x_ptr"].itemsize if a["IS_SPLIT"] else 1)


def _product(a: dict[str, Any], counts: npt.NDArray[np.int64], weights: float, planes: float = 1) -> Bytes:
    """The bytes of a product of `counts` rows with each of several weights. `planes` is the size of its output."""
    num_tiles = int(-(-counts // a["ROWS"]).sum())
    x, y = (int(counts.sum()) * size * a["x_ptr"].itemsize for size in (a["IN"], a["OUT"]))
    blocks = math.ceil(a["OUT"] / a["BLOCK_N"])
    least = int((counts > 0).sum()) * weights + x / a["PAIRS_PER_ROW"] + y * planes
    return Bytes(least, num_tiles * weights + blocks * x + y * planes)


def _code_bytes(a: dict[str, Any]) -> int:
    shifts = [a[f"{name}_ptr"] for name in ("zeros", "minima") if a[f"HAS_{name.upper()}"]]
    return sum(one.nbytes for one in (a["codes_ptr"], a["scales_ptr"], *shifts))


def _dequantize_codes(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    num_columns = a["end"] - a["first"]
    read = _code_bytes(a) * num_columns / a["codes_ptr"].shape[1]
    return once(read + num_columns * a["IN"] * a["weight_ptr"].itemsize)


def _round_rows(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    read = a["num_parts"] * a["SIZE"] * a["x_ptr"].itemsize
    written = a["num_parts"] * (a["SIZE"] + FLOAT)
    # The rows are read again when they are rounded.
    return Bytes(read + written, 2 * read + written)


def _sum_splits(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    return once(launch.grid[0] * a["OUT"] * (a["num_splits"] * FLOAT + a["y_ptr"].itemsize))


def _sum(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    row = a["SIZE"] * ((a["TOP_K"] + 1) * a["y_ptr"].itemsize + a["HAS_SHARED"] * a["shared_ptr"].itemsize)
    return once(step.batch.num_tokens * (row + a["TOP_K"] * FLOAT))


def _tiles(arguments: dict[str, Any], step: RecordedStep) -> Iterator[tuple[int, int]]:
    """Numbers of query rows and visible keys in each nonempty tile of an attention launch."""
    block_q, window = arguments["BLOCK_Q"], arguments["WINDOW"]
    cu_q = step.batch.cu_q.tolist()
    for begin, end, length in zip(cu_q, cu_q[1:], step.batch.seq_lens.tolist(), strict=False):
        num_rows = end - begin
        if not arguments["MIN_ROWS"] <= num_rows <= arguments["MAX_ROWS"]:
            continue
        for first in range(0, num_rows, block_q):
            rows = min(block_q, num_rows - first)
            position = length - num_rows + first
            first_key = max(position - window + 1, 0) if window else 0
            yield rows, position + rows - first_key


def _splits_used(arguments: dict[str, Any], num_keys: int, num_splits: int) -> int:
    tiles = -(-num_keys // arguments["TILE_N"])
    return -(-tiles // max(-(-tiles // num_splits), arguments["MIN_TILES"]))


def _num_partial(arguments: dict[str, Any], step: RecordedStep, num_splits: int) -> int:
    """Number of partial results of all query rows."""
    used = ((rows, _splits_used(arguments, keys, num_splits)) for rows, keys in _tiles(arguments, step))
    return sum(rows * count for rows, count in used if count > 1)


def _attend(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a, num_splits = launch.arguments, launch.grid[2]
    num_heads = a["NUM_KV_HEADS"] * a["GROUP"]
    scale = SCALE_BYTES if a["NUM_SCALES"] else 0
    key = 2 * a["NUM_KV_HEADS"] * (a["HEAD_DIM"] * a["kv_ptr"].itemsize + scale)
    tiles = list(_tiles(a, step))
    lengths, cu_q = step.batch.seq_lens.tolist(), step.batch.cu_q.tolist()
    distinct = 0
    for length, begin, end in zip(lengths, cu_q, cu_q[1:], strict=False):
        if a["MIN_ROWS"] <= end - begin <= a["MAX_ROWS"]:
            seen = a["WINDOW"] + end - begin - 1 if a["WINDOW"] else length
            distinct += min(length, seen)
    row = num_heads * a["HEAD_DIM"] * a["q_ptr"].itemsize
    num_rows = sum(rows for rows, _ in tiles)
    partial = _num_partial(a, step, num_splits)
    # A partial result consists of HEAD_DIM floats and a log-sum-exp. It is written once and read once.
    rest = 2 * num_rows * row + 2 * partial * num_heads * (a["HEAD_DIM"] + 1) * FLOAT
    return Bytes(distinct * key + rest, sum(keys for _, keys in tiles) * key + rest)


def _gather_pages(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    written = a["rows_ptr"].nbytes
    num_elements = written // a["rows_ptr"].itemsize
    scales = SCALE_BYTES * num_elements // a["HEAD_DIM"] if a["NUM_SCALES"] else 0
    return once(written + num_elements * a["kv_ptr"].itemsize + scales)


def _group_maxima(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    return once(launch.grid[0] * (a["V"] * a["logits_ptr"].itemsize + a["NUM_GROUPS"] * FLOAT))


def _choose_greedily(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    """Greedy sampling reads the maxima of all groups and the logits of one group."""
    a = launch.arguments
    assert a["ALL_GREEDY"], "steps are counted with temperature 0"
    return once(launch.grid[0] * (a["NUM_GROUPS"] * FLOAT + a["GROUP"] * a["logits_ptr"].itemsize))


def _rows_between(step: RecordedStep, least: int, most: float) -> list[int]:
    """The numbers of rows of the step's sequences that have between `least` and `most` rows."""
    counts = np.diff(step.batch.cu_q).tolist()
    return [count for count in counts if least <= count <= most]


def _convolve(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    counts = _rows_between(step, 1, math.inf)
    row = a["CHANNELS"] * (a["x_ptr"].itemsize + a["y_ptr"].itemsize)
    # The stored inputs are read and replaced. A tile also reads the inputs before its first row.
    taps = a["CONV_LEN"] - 1
    tails, weights = 2 * len(counts) * taps * a["CHANNELS"] * FLOAT, a["weight_ptr"].nbytes
    num_tiles = sum(-(-count // a["TILE"]) for count in counts)
    again = (num_tiles - len(counts)) * taps * a["CHANNELS"] * a["x_ptr"].itemsize
    least = sum(counts) * row + tails + weights
    return Bytes(least, least + again + (num_tiles - 1) * weights)


def _delta_row(a: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of a row's q and k, of its v and y, and of a head's matrix."""
    size = a["qkv_ptr"].itemsize
    return 2 * a["NUM_K"] * a["K_DIM"] * size, 2 * a["NUM_V"] * a["V_DIM"] * size, a["V_DIM"] * a["K_DIM"] * FLOAT


def _delta_rule(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    counts = _rows_between(step, 1, a["MAX_ROWS"])
    keys, values, matrix = _delta_row(a)
    rest = sum(counts) * values + 2 * len(counts) * a["NUM_V"] * matrix
    rest += sum(counts) * 2 * a["NUM_V"] * a["gates_ptr"].itemsize
    # Each program reads q and k of its head.
    again = a["NUM_V"] // a["NUM_K"] * launch.grid[2]
    return Bytes(rest + sum(counts) * keys, rest + sum(counts) * keys * again)


def _scratch(a: dict[str, Any], counts: list[int]) -> int:
    """Bytes of T, P and the factors of all chunks."""
    return sum(-(-count // a["CHUNK"]) for count in counts) * a["NUM_V"] * (2 * a["CHUNK"] + 4) * a["CHUNK"] * FLOAT


def _prepare_chunks(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    counts = _rows_between(step, a["MIN_ROWS"], math.inf)
    keys = sum(counts) * 2 * a["NUM_K"] * a["K_DIM"] * a["qkv_ptr"].itemsize
    rest = _scratch(a, counts) + sum(counts) * 2 * a["NUM_V"] * a["gates_ptr"].itemsize
    return Bytes(rest + keys, rest + keys * (a["NUM_V"] // a["NUM_K"]))


def _apply_chunks(launch: TritonLaunch, step: RecordedStep) -> Bytes:
    a = launch.arguments
    counts = _rows_between(step, a["MIN_ROWS"], math.inf)
    keys, values, matrix = _delta_row(a)
    num_chunks = sum(-(-count // a["CHUNK"]) for count in counts)
    least = _scratch(a, counts) + sum(counts) * (keys + values) + 2 * len(counts) * a["NUM_V"] * matrix
    # Each chunk reads q once, k twice and the matrix twice, and writes the matrix once.
    heads = launch.grid[2] * a["NUM_V"] // a["NUM_K"]
    asked = launch.grid[2] * _scratch(a, counts) + sum(counts) * (1.5 * keys * heads + values)
    return Bytes(least, asked + 3 * num_chunks * a["NUM_V"] * matrix)


_FORMULAS: dict[str, Callable[[TritonLaunch, RecordedStep], Bytes]] = {
    "_norm": _norm,
    "_convolve": _convolve,
    "_delta_rule": _delta_rule,
    "_prepare_chunks": _prepare_chunks,
    "_apply_chunks": _apply_chunks,
    "_rotate_and_store": _rotate_and_store,
    "_gate": _gate,
    "shrink_kernel": _shrink,
    "expand_kernel": _expand,
    "lora_linear_kernel": _lora_linear,
    "_route": _route,
    "_group": _group,
    "_list_pairs": _list_pairs,
    "_multiply": _multiply,
    "_dequantize_codes": _dequantize_codes,
    "_multiply_codes": _multiply_codes,
    "_round_rows": _round_rows,
    "_sum_splits": _sum_splits,
    "_sum": _sum,
    "_attend": _attend,
    "_gather_pages": _gather_pages,
    "group_maxima": _group_maxima,
    "choose_tokens": _choose_greedily,
}


def shape_text(launch: TorchLaunch) -> str:
    return " ".join("x".join(map(str, one.shape)) for one in launch.inputs)
