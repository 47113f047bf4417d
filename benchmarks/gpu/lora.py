"""Measures a step's LoRA products with the kernels of loramux, vLLM and SGLang, and with gather + bmm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.answers import CheckError
from benchmarks.gpu.adapters import LoraBatch, LoraCase, ResidentAdapters, batch_of, expected_change
from benchmarks.gpu.bench import Bench, Goal, Row, require_close
from benchmarks.gpu.model import Model, model_of
from benchmarks.gpu.peers import Peer, load_peers
from benchmarks.gpu.ways import LayerLaunch, MakeLaunch, OwnPlanes, gather_bmm_way, loramux_way, num_stored_layers

KEPT_FREE = 24 << 30
"""Device memory, in bytes, that the pool leaves for dense copies, references and captured graphs."""

WARM_POOL_BYTES = 1 << 30
OURS, OURS_PDL = "loramux", "loramux pdl"
MIXED = (8, 16, 32, 64)


def cases(bench: Bench) -> list[LoraCase]:
    """Decode cases, with an adapter per row or shared adapters, and prefill cases. The most important come first."""
    if bench.is_tiny:
        return [
            LoraCase(4, 4, (1, 8, 16, 5), "mixed"),
            LoraCase(24, 2, (8, 3), "mixed"),
            LoraCase(6, 6, (4,), "4"),
        ]

    def decode(num: int, label: str) -> LoraCase:
        ranks = MIXED * num if label == "mixed" else (int(label),) * num
        # A "mixed" case with a single adapter uses the largest rank.
        return LoraCase(num, num, ranks[:num] if num > 1 else (max(ranks),), label)

    special = [
        LoraCase(64, 64, (16,) * 16, "16"),
        LoraCase(64, 64, (16,), "16"),
        LoraCase(512, 8, (16,) * 8, "16"),
        LoraCase(512, 8, MIXED * 2, "mixed"),
    ]
    if bench.is_quick:
        return [decode(64, "mixed"), decode(64, "16"), decode(8, "16"), *special[:3]]
    labels, numbers = ("16", "mixed", "64", "8"), (64, 256, 32, 8, 1)
    listed = [decode(num, label) for label in labels for num in numbers]
    # One adapter of the largest rank is already listed under that rank.
    listed = [case for case in listed if case.label != "mixed" or case.num_adapters > 1]
    if not bench.is_full:
        # Ranks 8 and 64 show little that rank 16 and mixed ranks do not, so keep them only for 8 and 64 adapters.
        listed = [case for case in listed if case.label in ("16", "mixed") or case.num_adapters in (8, 64)]
    return [*special, *listed]


@dataclass(slots=True)
class Way:
    """A method: its launch for a layer, the number of layers that it stores, and its results so far."""

    launch: LayerLaunch
    num_stored: int
    error: float = 0.0
    seconds: float | None = None


def run(bench: Bench) -> Iterator[Row]:
    model = model_of(bench)
    peers, problems = load_peers(bench.peers, bench.device)
    yield from (Row("every case", name, problem=problem) for name, problem in problems.items())
    yield from (Row("every case", peer.name, problem=f"loaded: {peer.version}") for peer in peers)
    wanted = cases(bench)
    num_bytes = shared_pool_bytes(bench, model, wanted)
    yield from bench.each(wanted, OURS, lambda case: _run_case(bench, model, case, peers, num_bytes))


def warm(bench: Bench, shard: int, num_shards: int) -> None:
    """Compile the kernels of this shard's cases: one layer of each method, over a few pages and one dense adapter."""
    model = model_of(bench)
    peers, _ = load_peers(bench.peers, bench.device)
    pool = bench.pool(model.geometry(bench.dtype.itemsize), WARM_POOL_BYTES)
    for case in cases(bench)[shard::num_shards]:
        batch = batch_of(bench, model, case)
        adapters = ResidentAdapters(bench, model, pool, case.ranks, shares_pages=True)
        ways = own_ways(bench, adapters, batch, OwnPlanes(adapters, batch))
        single = ResidentAdapters(bench, model, pool, (max(case.ranks),), shares_pages=True)
        for launch in [way.launch for way in ways.values()] + [peer.make(single, batch, 1) for peer in peers]:
            launch(0, batch.outputs())
        bench.release()


def pool_bytes_of(bench: Bench, model: Model, case: LoraCase) -> int:
    geometry = model.geometry(bench.dtype.itemsize)
    elements = sum(-(-side // 128) * 128 for one in model.modules for side in (one.in_features, one.out_features))
    # Round up: an adapter can end inside a page, and each of its parts starts at a chunk boundary.
    pages = sum(-(-(rank * elements) // geometry.adapter_elements) + 2 for rank in case.ranks)
    return pages * geometry.total_page_bytes


def shared_pool_bytes(bench: Bench, model: Model, wanted: list[LoraCase]) -> int:
    """Size of the pool that all cases share, in bytes: the largest case's need, limited by the card's free memory."""
    num_bytes = max(pool_bytes_of(bench, model, case) for case in wanted)
    return min(num_bytes, max(0, bench.free_bytes() - (0 if bench.is_tiny else KEPT_FREE)))


def own_ways(bench: Bench, adapters: ResidentAdapters, batch: LoraBatch, planes: OwnPlanes) -> dict[str, Way]:
    num_layers = batch.model.num_layers
    ways = {OURS: Way(loramux_way(adapters, batch, planes, pdl=False), num_layers)}
    if bench.has_pdl:
        ways[OURS_PDL] = Way(loramux_way(adapters, batch, planes, pdl=True), num_layers)
    return ways


def _run_case(bench: Bench, model: Model, case: LoraCase, peers: list[Peer], num_bytes: int) -> Iterator[Row]:
    pool = bench.pool(model.geometry(bench.dtype.itemsize), num_bytes)
    adapters = ResidentAdapters(bench, model, pool, case.ranks, shares_pages=False)
    batch = batch_of(bench, model, case)
    planes, num_stored = OwnPlanes(adapters, batch), num_stored_layers(adapters)
    makers: dict[str, Callable[[], Way]] = {
        name: partial(replace, way) for name, way in own_ways(bench, adapters, batch, planes).items()
    }
    for name, make_launch in {"gather + bmm": gather_bmm_way, **{peer.name: peer.make for peer in peers}}.items():
        makers[name] = partial(_with_copies, make_launch, adapters, batch, num_stored)

    layers = checked_layers(model, num_stored)
    expected = {layer: expected_change(adapters, batch, layer) for layer in layers}
    ways: dict[str, Way] = {}
    for name, make in makers.items():
        try:
            way = make()
            way.error = max(
                _check(way.launch, batch, layer, expected[layer]) for layer in layers if layer < way.num_stored
            )
            ways[name] = way
        except Exception as error:
            yield _lost(bench, case, name, error)
    del expected
    if bench.is_timed:
        yield from _timed(bench, adapters, batch, planes, ways)
    else:
        yield from (Row(str(case), name, {"error": way.error}) for name, way in ways.items())


def checked_layers(model: Model, num_stored: int) -> list[int]:
    """The first layer, the last of `num_stored` stored layers, and the model's last layer."""
    return sorted({0, num_stored - 1, model.num_layers - 1})


def _lost(bench: Bench, case: LoraCase, name: str, error: Exception) -> Row:
    """The row of a failed method, which counts as a failure only for loramux. Raises `error` if the device is lost."""
    if bench.is_broken():
        raise error
    kind = "wrong" if isinstance(error, CheckError) else type(error).__name__
    return Row(str(case), name, problem=f"{kind}: {error}", is_failure=name in (OURS, OURS_PDL))


def _with_copies(make: MakeLaunch, adapters: ResidentAdapters, batch: LoraBatch, num_stored: int) -> Way:
    return Way(make(adapters, batch, num_stored), num_stored)


def _check(launch: LayerLaunch, batch: LoraBatch, layer: int, expected: list[torch.Tensor]) -> float:
    """The largest error of any group, relative to the adapters' contribution. The outputs are random beforehand, so the
    launch must add to them.
    """
    before = batch.outputs()
    ys = [y.clone() for y in before]
    launch(layer, ys)
    return max(
        require_close(y, start.double() + change, scale=change)
        for y, start, change in zip(ys, before, expected, strict=True)
    )


def _timed(
    bench: Bench, adapters: ResidentAdapters, batch: LoraBatch, planes: OwnPlanes, ways: dict[str, Way]
) -> Iterator[Row]:
    """Time all methods in turn, each as one graph of all layers. Then time loramux's launches without work, with all
    ranks set to 0.
    """
    assert bench.ceilings is not None
    case, model = batch.case, batch.model
    replays = {}
    # A graph does not keep the tensors that it writes alive.
    outputs = {name: batch.outputs() for name in ways}
    for name, way in ways.items():

        def step(launch: LayerLaunch = way.launch, ys: list[torch.Tensor] = outputs[name]) -> None:
            for layer in range(model.num_layers):
                launch(layer, ys)

        try:
            # Run once outside the graph, because some methods prepare a layer on its first launch.
            step()
            replays[name] = bench.capture(step)
        except Exception as error:
            yield _lost(bench, case, name, error)
    ways = {name: way for name, way in ways.items() if name in replays}
    for name, seconds in bench.time(replays).items():
        ways[name].seconds = seconds
    rank = adapters.tables.rank.clone()
    adapters.tables.rank.zero_()
    own = {name: replay for name, replay in replays.items() if name in (OURS, OURS_PDL)}
    without_ranks = bench.time(own) if own else {}
    adapters.tables.rank.copy_(rank)

    weights, activations = adapters.weight_bytes(), batch.activation_bytes()
    floor = (weights + activations) / bench.ceilings.bandwidth
    num_launches = launches_of(model)
    budget = 1.2 * floor + num_launches * bench.ceilings.node
    best_peer = min(
        (way.seconds for name, way in ways.items() if way.seconds and name.startswith(("vllm", "sglang"))), default=None
    )
    best_own = min((way.seconds for name, way in ways.items() if way.seconds and name in own), default=None)
    rows = []
    for name, way in ways.items():
        assert way.seconds is not None
        figures = {"time_us": way.seconds * 1e6, "floor_us": floor * 1e6, "over_floor": way.seconds / floor}
        goals: list[Goal] = []
        if name in own:
            figures |= {
                "over_budget": way.seconds / budget,
                "without_ranks_us": without_ranks[name] * 1e6,
                "weights_mb": weights / 1e6,
                "activations_mb": activations / 1e6,
                "planes_mb": planes.traffic_bytes(batch) / 1e6,
            }
            if best_peer is not None:
                figures["faster_than_peers"] = best_peer / way.seconds
            # The engine can run with or without `pdl`, so the goals apply only to the faster of the two.
            if way.seconds == best_own:
                goals = _goals(case, has_peers=best_peer is not None)
        elif best_own is not None:
            figures["over_loramux"] = way.seconds / best_own
        if way.num_stored < model.num_layers:
            figures["stored_layers"] = way.num_stored
        rows.append(Row(str(case), name, figures | {"error": way.error}, tuple(goals)))
    bench.say(f"  {case}: " + ", ".join(f"{row.way} {row.figures['time_us']:.0f} us" for row in rows))
    yield from rows


def launches_of(model: Model) -> int:
    """Number of kernel launches in a step: one shrink and one expand for each group in each layer."""
    return 2 * len(model.groups) * model.num_layers


def _goals(case: LoraCase, has_peers: bool) -> list[Goal]:
    goals = [Goal("over_budget", 1.0)]
    if sum(case.ranks) >= 4096:
        goals.append(Goal("over_floor", 1.35))
    if has_peers:
        goals.append(Goal("faster_than_peers", 1.0 if case.is_uniform else 1.5, is_upper=False))
    return goals
