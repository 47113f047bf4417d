"""Measures paged attention and torch's SDPA against the bandwidth floor (decode) and the matrix rate (prefill)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as functional

from benchmarks.answers import CheckError
from benchmarks.gpu.bench import POOL_STD, Bench, Row, require_close
from benchmarks.gpu.model import Model, model_of
from loramux.kernels.gpu.attention import paged_attention
from loramux.kernels.gpu.attention_plan import PAGE_TOKENS, attention_plan
from loramux.kernels.gpu.contiguous_attention import flash_attention, gather_pages, has_flash_attention
from loramux.kernels.layout import SCALE_BYTES
from loramux.kernels.reference.attention import contiguous_attention, to_codes
from loramux.kernels.tables import AttentionBatch, ContiguousKeys, PoolViews

MAX_KV_BYTES = 72 << 30
"""Maximum size of a case's pages, in bytes. If not all layers fit, the row reports how many are stored."""

MAX_DENSE_BYTES = 9 << 30
"""Maximum size of SDPA's contiguous keys and values, in bytes. At least one layer is always stored."""

ROUNDED_PAGES = 1 << 12
"""Number of pages of a layer that are rounded to codes at a time."""

KEPT_FREE = 24 << 30
WARM_POOL_BYTES = 1 << 30
SAMPLED_ROWS = 64
"""Number of random query rows of a prefill that are compared with float64. The other rows only have to be finite."""

QUERY_STD = 2 / POOL_STD
"""Standard deviation of queries. The standard deviation of scores is then 2, so attention is neither uniform nor
concentrated on a single key.
"""

OURS, SDPA = "loramux", "torch SDPA on contiguous K and V"
CONTIGUOUS, GATHERED = "loramux on contiguous K and V", "loramux on gathered pages"
"""How the engine computes a prefill without and with a prefix in steps that are not captured."""

CODES = "loramux with K and V in int8"
CODES_SEQUENCES = 64
"""Number of sequences of the decodes that are also measured with K and V in int8."""

LayerLaunch = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences of one context length with `num_queries` rows each: 1 in decode, the whole context in prefill."""

    num_sequences: int
    context: int
    num_queries: int

    @property
    def is_decode(self) -> bool:
        return self.num_queries == 1

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.num_queries

    @property
    def pages_each(self) -> int:
        return -(-self.context // PAGE_TOKENS)

    def kv_bytes(self, model: Model, itemsize: int, scale_bytes: int = 0) -> int:
        """Bytes of K and V, with a scale of `scale_bytes` for each token and head."""
        num_rows = self.num_sequences * self.context * 2 * model.num_kv_heads
        return num_rows * (model.head_dim * itemsize + scale_bytes)

    def operations(self, model: Model) -> int:
        """Number of multiplications and additions in one layer's two matrix products, counting visible keys only."""
        visible = self.num_queries * self.context - self.num_queries * (self.num_queries - 1) // 2
        return 4 * self.num_sequences * model.num_heads * model.head_dim * visible

    def __str__(self) -> str:
        return f"decode b={self.num_sequences} ctx={self.context}" if self.is_decode else f"prefill {self.context}"


def cases(bench: Bench) -> list[AttentionCase]:
    if bench.is_tiny:
        return [AttentionCase(3, 37, 1), AttentionCase(1, 21, 21)]
    batches = (1, 64) if bench.is_quick else (1, 16, 64, 256)
    contexts = (1024,) if bench.is_quick else (512, 1024, 8192)
    prefills = (2048,) if bench.is_quick else (512, 2048, 8192)
    if bench.is_full:
        prefills = (*prefills, 32768)
    prefill = [AttentionCase(1, length, length) for length in prefills]
    decode = [AttentionCase(batch, context, 1) for context in contexts for batch in batches]
    if not bench.is_full:
        # Other context lengths behave like 1,024. Of these, keep only 8,192, with 1 and 64 sequences.
        kept = {(batch, 1024) for batch in batches} | {(1, 8192), (64, 8192)}
        decode = [case for case in decode if (case.num_sequences, case.context) in kept]
    return [*prefill, *decode]


def run(bench: Bench) -> Iterator[Row]:
    model = model_of(bench)
    wanted = cases(bench)
    itemsize = bench.dtype.itemsize
    allowed = allowed_bytes(bench)
    # Start with the largest size, so that the pool is allocated only once.
    bench.pool(model.geometry(itemsize), max(pool_bytes_of(model, case, itemsize, allowed) for case in wanted))
    yield from bench.each(wanted, OURS, lambda case: _run_case(bench, model, case, allowed))


def warm(bench: Bench, shard: int, num_shards: int) -> None:
    model = model_of(bench)
    for case in cases(bench)[shard::num_shards]:
        num_layers = num_stored(model, case, bench.dtype.itemsize, MAX_KV_BYTES)
        pool = bench.pool(model.geometry(bench.dtype.itemsize, num_layers), WARM_POOL_BYTES)
        attention = Attention(bench, model, case, pool)
        attention.launch(0)
        if not case.is_decode:
            gather_pages(pool, 0, attention.batch.pages, model.attention)
        if has_codes(bench, case):
            Attention(bench, model, case, pool_of_codes(pool, 1)).launch(0)


def allowed_bytes(bench: Bench) -> int:
    """Maximum size of a case's pages on this device, in bytes."""
    return min(MAX_KV_BYTES, max(0, bench.free_bytes() - (0 if bench.is_tiny else KEPT_FREE)))


def num_stored(model: Model, case: AttentionCase, itemsize: int, allowed: int) -> int:
    page_bytes = model.geometry(itemsize, 1).total_page_bytes
    return min(model.num_layers, allowed // (case.num_sequences * case.pages_each * page_bytes))


def pool_bytes_of(model: Model, case: AttentionCase, itemsize: int, allowed: int) -> int:
    page_bytes = model.geometry(itemsize, 1).total_page_bytes
    return num_stored(model, case, itemsize, allowed) * case.num_sequences * case.pages_each * page_bytes


class Attention:
    """One case's pages, rows and launches. If the pool is too small, sequences share pages."""

    def __init__(self, bench: Bench, model: Model, case: AttentionCase, pool: PoolViews) -> None:
        self.model, self.case, self.pool = model, case, pool
        num_pages, listed = pool.raw.shape[0], case.num_sequences * case.pages_each
        pages = np.random.default_rng(5).permutation(max(num_pages, listed))[:listed] % num_pages
        self.pages = torch.from_numpy(pages).view(case.num_sequences, case.pages_each).to(bench.device)

        def numbers(values: range, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(list(values), dtype=dtype, device=bench.device)

        self.batch = AttentionBatch(
            cu_q=numbers(range(0, case.num_rows + 1, case.num_queries)),
            seq_lens=torch.full((case.num_sequences,), case.context, dtype=torch.int32, device=bench.device),
            pages=self.pages.flatten().to(torch.int32),
            page_starts=numbers(range(0, listed, case.pages_each)),
            # The launch writes no K and V.
            kv_slots=torch.full((case.num_rows,), -1, dtype=torch.int64, device=bench.device),
            max_q=case.num_queries,
        )
        generator = bench.generator(6)
        shape = (case.num_rows, model.num_heads, model.head_dim)
        self.q = torch.randn(shape, generator=generator, device=bench.device).mul_(QUERY_STD).to(bench.dtype)
        self.out = torch.full_like(self.q, torch.nan)
        self._plan = attention_plan(
            case.num_rows, case.num_sequences, model.attention, bench.dtype.itemsize,
            all_short=case.is_decode, num_processors=bench.num_processors, has_codes=pool.kv_scales is not None,
        )  # fmt: skip
        elements = self._plan.workspace_elements(case.num_rows, case.num_sequences, model.attention)
        self._workspace = torch.full((elements,), torch.nan, device=bench.device)
        num_counters = self._plan.num_counters(case.num_rows, case.num_sequences, model.attention)
        self._counters = torch.zeros(num_counters, dtype=torch.int32, device=bench.device)

    @property
    def num_layers(self) -> int:
        return self.pool.geometry.num_layers

    def launch(self, layer: int) -> None:
        paged_attention(
            self.q, self.pool, layer % self.num_layers, self.batch, self.model.attention, self._plan, self._workspace,
            self._counters, self.out,
        )  # fmt: skip

    def dense(self, layer: int, sequences: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[num_sequences, num_kv_heads, context, head_dim]`, gathered from pages laid out as in the engine."""
        heads, width = self.model.num_kv_heads, self.model.head_dim
        pages = self.pages[sequences]
        kv = self.pool.kv[pages, layer].unflatten(2, (2, heads, PAGE_TOKENS, width))
        if self.pool.kv_scales is not None:
            scales = self.pool.kv_scales[pages, layer].unflatten(2, (2, heads, PAGE_TOKENS))
            kv = kv.float() * scales.float()[..., None]
        k, v = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : self.case.context]
        return k, v

    def check(self, launch: LayerLaunch, layer: int) -> float:
        """The largest error of any sequence in one layer, compared with float64."""
        case = self.case
        self.out.fill_(torch.nan)
        launch(layer)
        if not bool(self.out.isfinite().all()):
            raise CheckError("some elements were not written or are not finite")
        chosen = torch.randperm(case.num_queries, generator=torch.Generator().manual_seed(7))[:SAMPLED_ROWS]
        chosen = torch.cat([chosen, torch.tensor([0, case.num_queries - 1])]).unique().to(self.q.device)
        position = chosen + case.context - case.num_queries
        is_hidden = torch.arange(case.context, device=self.q.device)[None, :] > position[:, None]
        worst = 0.0
        for i in range(case.num_sequences):
            k, v = (one[0].double() for one in self.dense(layer, slice(i, i + 1)))
            q = self.q[i * case.num_queries + chosen].double().unflatten(1, (self.model.num_kv_heads, -1))
            scores = torch.einsum("thgd,hsd->hgts", q, k) * self.model.attention.scale
            weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
            expected = torch.einsum("hgts,hsd->thgd", weights, v).flatten(1, 2)
            worst = max(worst, require_close(self.out[i * case.num_queries + chosen], expected))
        return worst


def sdpa_way(bench: Bench, attention: Attention) -> tuple[LayerLaunch, int]:
    """Prepare torch's attention over contiguous copies of as many layers as fit. Return its launch and the number of
    copied layers.

    In decode, the query heads of a group are passed as query rows.
    """
    case, model = attention.case, attention.model
    layer_bytes = case.kv_bytes(model, bench.dtype.itemsize)
    num_layers = min(attention.num_layers, max(1, MAX_DENSE_BYTES // layer_bytes))
    stored = []
    for layer in range(num_layers):
        dense = [
            torch.empty(case.num_sequences, model.num_kv_heads, case.context, model.head_dim, device=bench.device,
                        dtype=bench.dtype)
            for _ in range(2)
        ]  # fmt: skip
        # Gather a few sequences at a time to limit the memory that gathered pages take.
        for begin in range(0, case.num_sequences, 16):
            sequences = slice(begin, begin + 16)
            for target, source in zip(dense, attention.dense(layer, sequences), strict=True):
                target[sequences] = source
        stored.append(dense)
    q, out = attention.q, attention.out
    scale = model.attention.scale

    def decode(layer: int) -> None:
        k, v = stored[layer % num_layers]
        grouped = q.unflatten(1, (model.num_kv_heads, -1))
        out.view_as(grouped).copy_(functional.scaled_dot_product_attention(grouped, k, v, scale=scale))

    def prefill(layer: int) -> None:
        k, v = stored[layer % num_layers]
        found = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        out.copy_(found[0].transpose(0, 1))

    return (decode if case.is_decode else prefill), num_layers


def contiguous_ways(bench: Bench, attention: Attention) -> tuple[dict[str, LayerLaunch], int]:
    """Prepare torch's FlashAttention over gathered pages, with and without the gather, for the only sequence of a
    prefill. Return the launches and the number of copied layers.
    """
    case, model, pages = attention.case, attention.model, attention.batch.pages
    spec, device = model.attention, bench.device
    num_layers = min(attention.num_layers, max(1, MAX_DENSE_BYTES // case.kv_bytes(model, bench.dtype.itemsize)))
    compute = flash_attention if has_flash_attention(device, bench.dtype) else contiguous_attention

    def bounds(end: int) -> torch.Tensor:
        return torch.tensor([0, 0, end, end], dtype=torch.int32, device=device)

    keys = ContiguousKeys(
        cu_q=bounds(case.num_queries), cu_k=bounds(case.context), pages=pages, max_q=case.num_queries,
        max_k=case.context, num_rows=case.num_rows, rows_per_key=case.num_queries, has_decodes=False,
    )  # fmt: skip
    stored = [gather_pages(attention.pool, layer, pages, spec) for layer in range(num_layers)]

    def contiguous(layer: int) -> None:
        compute(attention.q, *stored[layer % num_layers], keys, spec, attention.out)

    def gathered(layer: int) -> None:
        rows = gather_pages(attention.pool, layer % attention.num_layers, pages, spec)
        compute(attention.q, *rows, keys, spec, attention.out)

    return {CONTIGUOUS: contiguous, GATHERED: gathered}, num_layers


def pool_of_codes(pool: PoolViews, num_layers: int) -> PoolViews:
    """A pool with the same pages, with K and V of the first `num_layers` layers rounded to int8 codes."""
    geometry = replace(pool.geometry, num_layers=num_layers, kv_itemsize=1, elements_per_scale=pool.geometry.head_dim)
    num_pages, device = pool.raw.shape[0], pool.raw.device
    raw = torch.empty(num_pages, num_layers, geometry.page_bytes, dtype=torch.uint8, device=device)
    scales = torch.empty(num_pages, num_layers, geometry.num_scales, dtype=torch.bfloat16, device=device)
    kv = raw.view(torch.int8)
    for layer in range(num_layers):
        for begin in range(0, num_pages, ROUNDED_PAGES):
            pages = slice(begin, begin + ROUNDED_PAGES)
            # On a GPU, the rows of the heads follow each other in the order of their scales.
            codes, scales[pages, layer] = to_codes(pool.kv[pages, layer].unflatten(1, (-1, geometry.head_dim)))
            kv[pages, layer] = codes.flatten(1)
    return PoolViews(raw=raw, kv=kv, adapter=raw.view(pool.adapter.dtype), geometry=geometry, kv_scales=scales)


def has_codes(bench: Bench, case: AttentionCase) -> bool:
    return case.is_decode and (bench.is_tiny or case.num_sequences == CODES_SEQUENCES)


def with_codes(bench: Bench, attention: Attention) -> Attention:
    """The same decode over K and V as int8 codes, of as many layers as SDPA's copies may take bytes."""
    case, model = attention.case, attention.model
    layer_bytes = case.kv_bytes(model, 1, SCALE_BYTES)
    num_layers = min(attention.num_layers, max(1, MAX_DENSE_BYTES // layer_bytes))
    return Attention(bench, model, case, pool_of_codes(attention.pool, num_layers))


def _run_case(bench: Bench, model: Model, case: AttentionCase, allowed: int) -> Iterator[Row]:
    itemsize = bench.dtype.itemsize
    num_layers = num_stored(model, case, itemsize, allowed)
    if num_layers < 1:
        raise MemoryError(f"one layer takes {case.kv_bytes(model, itemsize) / 1e9:.1f} GB")
    geometry = model.geometry(itemsize, num_layers)
    pool = bench.pool(geometry, pool_bytes_of(model, case, itemsize, allowed))
    attention = Attention(bench, model, case, pool)
    errors = {OURS: max(attention.check(attention.launch, layer) for layer in sorted({0, num_layers - 1}))}
    launches: dict[str, LayerLaunch] = {OURS: attention.launch}
    stored = {OURS: num_layers}
    if has_codes(bench, case):
        codes = with_codes(bench, attention)
        launches[CODES], stored[CODES] = codes.launch, codes.num_layers
        errors[CODES] = max(codes.check(codes.launch, layer) for layer in sorted({0, codes.num_layers - 1}))
    if not case.is_decode:
        ways, num_copied = contiguous_ways(bench, attention)
        stored |= {CONTIGUOUS: num_copied, GATHERED: num_layers}
        for name, launch in ways.items():
            errors[name] = max(attention.check(launch, layer) for layer in sorted({0, stored[name] - 1}))
        launches |= ways
    try:
        launch, stored[SDPA] = sdpa_way(bench, attention)
        errors[SDPA] = max(attention.check(launch, layer) for layer in sorted({0, stored[SDPA] - 1}))
        launches[SDPA] = launch
    # Report loramux's figures even if SDPA fails.
    except (CheckError, RuntimeError) as error:
        if bench.is_broken():
            raise
        yield Row(str(case), SDPA, problem=f"{type(error).__name__}: {error}")
    if not bench.is_timed:
        yield from (Row(str(case), name, {"error": errors[name]}) for name in launches)
        return

    assert bench.ceilings is not None
    replays = {}
    for name, launch in launches.items():
        replays[name] = bench.capture(_repeated(launch, model.num_layers))
        replays[f"{name}, alone"] = bench.capture(_repeated(launch, 1))
    seconds = bench.time(replays)
    by_operations = case.operations(model) / bench.ceilings.matmul
    for name in launches:
        kv_bytes = case.kv_bytes(model, 1, SCALE_BYTES) if name == CODES else case.kv_bytes(model, itemsize)
        # Queries are read once, and outputs are written once.
        read = kv_bytes + 2 * attention.q.nbytes
        by_bytes = read / bench.ceilings.bandwidth
        floor = max(by_bytes, by_operations)
        one = seconds[name] / model.num_layers
        figures = {
            "layer_us": one * 1e6,
            "alone_us": seconds[f"{name}, alone"] * 1e6,
            "floor_us": floor * 1e6,
            "over_floor": one / floor,
        }
        if by_bytes >= by_operations:
            figures["tb_s"] = read / one / 1e12
        else:
            figures["tflop_s"] = case.operations(model) / one / 1e12
        if name != SDPA and SDPA in seconds:
            figures["over_sdpa"] = seconds[name] / seconds[SDPA]
        if name == CODES:
            figures["over_16_bits"] = seconds[name] / seconds[OURS]
        if stored[name] < model.num_layers:
            figures["stored_layers"] = stored[name]
        yield Row(str(case), name, figures | {"error": errors[name]})
    bench.say(f"  {case}: " + ", ".join(f"{name} {seconds[name] / model.num_layers * 1e6:.1f} us" for name in launches))


def _repeated(launch: LayerLaunch, num_layers: int) -> Callable[[], None]:
    def step() -> None:
        for layer in range(num_layers):
            launch(layer)

    return step
