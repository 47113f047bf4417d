"""Builds an engine from its configuration: weights, pool, tables and tiers."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.quantization.base_format import read_format
from loramux.adapter_store.sandbox.confinement import REQUIRED
from loramux.adapter_store.sandbox.fork_server import worker_environment
from loramux.adapter_store.tiers.host_slab import EngineMemory
from loramux.adapter_store.tiers.host_tier import HostTier
from loramux.adapter_store.tiers.staging_client import StagingClient, StagingRefused
from loramux.adapter_store.tiers.staging_link import OPEN_S
from loramux.engine.adapters.adapter_pool import AdapterPool
from loramux.engine.adapters.page_copier import Copier, PageCopier
from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.adapters.stager import Stager
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.model_files import base_sha256, model_sha256
from loramux.engine.architectures.weight_files import checkpoint_of
from loramux.engine.constraints.grammars import Grammars
from loramux.engine.decoder.decoder import Decoder
from loramux.engine.decoder.weights import WeightSource
from loramux.engine.device.accelerator import Accelerator, DeviceMemory
from loramux.engine.device.backend import Backend, open_backend
from loramux.engine.device.machine_limits import num_cpus
from loramux.engine.device.worker_group import WorkerGroup
from loramux.engine.drafting.speculation import Speculation
from loramux.engine.execution.device_sampler import DeviceSampler
from loramux.engine.execution.direct_executor import DirectExecutor
from loramux.engine.execution.executor import Executor
from loramux.engine.execution.graph_executor import GraphExecutor
from loramux.engine.execution.head_drafts import HeadRunner
from loramux.engine.execution.step_buffer import StepBuffer
from loramux.engine.execution.step_shape import reachable_shapes
from loramux.engine.loop.config import EngineConfig, activation_bits, check_gpus, check_kv_host_bytes, check_workers
from loramux.engine.loop.decode_reads import ReadsPerStep
from loramux.engine.loop.engine import Engine, EngineParts, Observers
from loramux.engine.loop.engine_stats import EngineStats
from loramux.engine.loop.loaded_base import LoadedBase, configured_target, load_base, max_draft_rows, pool_dtypes
from loramux.engine.pages.disk_file import DiskFile
from loramux.engine.pages.disk_pages import DiskPages
from loramux.engine.pages.eviction import new_policy
from loramux.engine.pages.host_memory import PinnedHostMemory
from loramux.engine.pages.host_pages import HostPages
from loramux.engine.pages.kv_pages import KvPages
from loramux.engine.pages.page_pool import PagePool
from loramux.engine.pages.pool_memory import allocate_pool, copy_page, pool_bytes_of, room_for_steps
from loramux.engine.pages.pool_size import in_gib
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.parallel.parallel_execution import ParallelCopier, ParallelExecutor
from loramux.engine.parallel.sharded_adapters import AdapterDivider
from loramux.engine.parallel.sharding import module_shards
from loramux.engine.parallel.weight_parts import check_groups
from loramux.engine.parallel.worker import Worker
from loramux.engine.parallel.workers import Workers
from loramux.engine.protocol.errors import ConfigNotUsable, PoolTooSmall
from loramux.engine.protocol.messages import Add, EngineReady, GraphMemory, SamplingParams
from loramux.engine.scheduling.fair_queue import FairQueue
from loramux.engine.scheduling.request_limits import EngineLimits
from loramux.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from loramux.engine.sequences.batch import ScheduledSequence, build_batch, head_rows
from loramux.engine.sequences.cache_groups import CacheLayout
from loramux.engine.sequences.sequence import PageTable, Sequence, block_list
from loramux.engine.tracing.sequence_traces import SequenceTraces
from loramux.engine.tracing.spans import SpanSink
from loramux.kernels.dispatch import Kernels
from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import PoolViews

SPARE_BYTES = 512 << 20
"""Bytes of shared memory in addition to the host tier, for loads in flight and fragmentation. Linux allocates each page
only when it is first written.
"""


@dataclass(frozen=True, slots=True, eq=False)
class AssembledEngine:
    """An engine, and the parts of it that its process uses directly. `workers` are the other workers of a
    tensor-parallel engine.
    """

    engine: Engine
    adapters: AdapterPool
    grammars: Grammars
    stager: Stager
    views: PoolViews
    ready: EngineReady
    disk: DiskPages
    """The disk tier of the prefix cache."""
    workers: Workers | None = None
    head_views: PoolViews | None = None
    """The pool of the base's own head for drafts, if it is used. It has as many pages as `views`."""

    def close(self) -> None:
        """Cancel loads, end the engine's processes, and delete its pages on disk."""
        self.adapters.close()
        self.disk.close()
        self.grammars.close()
        if self.workers is not None:
            self.workers.close()


def start_stager(config: EngineConfig, target: PackTarget, host: HostTier, wake: Callable[[], None]) -> StagingClient:
    """Start a staging process, which opens its tiers only in `open_stager`. The host tier is in memory that both
    processes share.

    Raises ConfigNotUsable if the process cannot be started.
    """
    try:
        return StagingClient(
            target,
            config.blob_url,
            config.cache_dir,
            config.disk_tier_bytes,
            config.model_dir,
            EngineMemory(config.host_tier_bytes + SPARE_BYTES),
            host,
            config.num_loaders,
            wake,
            quantized_dir=config.quantized_dir,
        )
    except StagingRefused as error:
        raise ConfigNotUsable(str(error)) from error


def open_stager(stager: StagingClient, accelerator: Accelerator) -> None:
    """Make the staging process open the configured tiers. Raises ConfigNotUsable for tiers that cannot be used."""
    accelerator.pin(torch.from_numpy(stager.host_memory))
    try:
        stager.open(OPEN_S)
    except StagingRefused as error:
        raise ConfigNotUsable(str(error)) from error


def assemble_engine(
    config: EngineConfig,
    wake: Callable[[], None],
    stager: Stager | None = None,
    weights: WeightSource | None = None,
    backend: Backend | None = None,
    note_running: Callable[[list[str]], None] | None = None,
    spans: SpanSink | None = None,
) -> AssembledEngine:
    """Load the model and allocate the pool. Raises EngineError.

    Other threads call `wake` when an idle engine has something to do. Only the calling thread may use the engine.
    Before each step, the engine passes the ids of the running sequences to `note_running`. `spans` receives the spans
    of traced sequences. Tests and benchmarks can supply their own stager, weights and backend.
    """
    check_kv_host_bytes(config)
    with ExitStack() as stack:
        workers = _start_workers(config)
        if workers is not None:
            stack.callback(workers.close)
        host, open_tiers = HostTier(config.host_tier_bytes), None
        if stager is None:
            # Its process starts while this one loads the model.
            stager = started = start_stager(config, configured_target(config), host, wake)
            stack.callback(started.close)
            open_tiers = partial(open_stager, started)
        assembled = _assemble(config, wake, host, stager, open_tiers, weights, backend, note_running, spans, workers)
        stack.pop_all()
    return assembled


def assemble_worker(config: EngineConfig, group: WorkerGroup, join: Callable[[], None]) -> Worker:
    """Load a share of the model, connect the workers with `join`, and allocate the worker's pool.

    Raises EngineError.
    """
    base = load_base(config, _backend(config, None, group))
    accelerator, decoder = base.backend.accelerator, base.decoder
    tables = SlotTables(base.target, config.max_resident_adapters, accelerator, decoder.outer_factors)
    accelerator.release_unused()
    join()
    views, _ = _allocate_views(base, _pool_bytes(base))
    kernels = base.backend.make_kernels(views, decoder.shapes)
    executor = _make_executor(base, tables, kernels, decoder)
    return Worker(executor, tables, views.raw, base.target, accelerator)


def _start_workers(config: EngineConfig) -> Workers | None:
    """Start the other workers of a tensor-parallel engine. They load the model at the same time as this process."""
    size = config.tensor_parallel_size
    if size == 1:
        return None
    model_dir = Path(config.model_dir)
    model = ModelConfig.load(model_dir)
    check_workers(config, model)
    check_gpus(config)
    if config.quantized_dir is not None or model.quantization is not None:
        quantized_dir = None if config.quantized_dir is None else Path(config.quantized_dir)
        check_groups(checkpoint_of(model_dir, quantized_dir), model, size)
    return Workers(msgspec.json.encode(config), size, config.device)


def _backend(config: EngineConfig, backend: Backend | None, group: WorkerGroup | None) -> Backend:
    """The engine's backend, by default that of its device, with its number of threads."""
    if backend is None:
        bits = activation_bits(config, ModelConfig.load(Path(config.model_dir)))
        gpu = 0 if group is None else group.worker
        backend = open_backend(config.device, config.pdl, bits, config.fused_lora, gpu)
    if group is not None:
        # A recorded program cannot exchange tensors.
        backend = replace(backend, workers=group, start_recording=None)
    backend.set_num_threads(config.num_threads // config.tensor_parallel_size)
    return backend


def _assemble(
    config: EngineConfig,
    wake: Callable[[], None],
    host: HostTier,
    stager: Stager,
    open_tiers: Callable[[Accelerator], None] | None,
    weights: WeightSource | None,
    backend: Backend | None,
    note_running: Callable[[list[str]], None] | None,
    spans: SpanSink | None,
    workers: Workers | None,
) -> AssembledEngine:
    """`open_tiers` is called before the stager is used."""
    backend = _backend(config, backend, None if workers is None else workers.group)
    accelerator = backend.accelerator
    allocated_before = accelerator.allocated_bytes()
    base = load_base(config, backend, weights)
    weight_bytes = _growth(allocated_before, accelerator.allocated_bytes())
    model, cache = base.model, base.decoder.cache_layout
    tables = SlotTables(base.target, config.max_resident_adapters, accelerator, base.decoder.outer_factors)
    accelerator.release_unused()
    # Compile before the pool is sized, so that memory cached by torch for activations does not count as free.
    before = accelerator.memory()
    _compile_programs(base, tables)
    after = accelerator.memory()
    cached_bytes = 0 if before is None or after is None else before.free - after.free
    if workers is not None:
        workers.join(base_sha256(Path(config.model_dir)))
    views, head_views = _allocate_views(base, _pool_bytes(base, cached_bytes))
    kernels = backend.make_kernels(views, base.decoder.shapes)
    pages = _page_pool(views, cache)
    policy, queue = new_policy(config.eviction_policy), FairQueue()
    if open_tiers is not None:
        open_tiers(accelerator)
    copier: Copier = PageCopier(views.raw, accelerator, wake, stager.figures)
    executor = _make_executor(base, tables, kernels, base.decoder, _head_runner(base, tables, views, head_views))
    graphs = executor.graph_memory if isinstance(executor, GraphExecutor) else GraphMemory
    num_pages_of = None
    if workers is not None:
        workers.await_ready()
        size = config.tensor_parallel_size
        shards = [module_shards(model, size, worker) for worker in range(size)]
        divider = AdapterDivider(base.whole_target, base.target, shards)
        executor, copier = ParallelExecutor(executor, workers), ParallelCopier(copier, workers, divider, wake)
        num_pages_of = divider.num_pages
    adapters = AdapterPool(
        pages,
        config.max_resident_adapters,
        stager,
        copier,
        tables,
        policy,
        on_residency=queue.set_resident,
        num_pages_of=num_pages_of,
    )
    _warm_up(executor, base)
    reads = _reads(base, views, weight_bytes)
    identity = (repr(model).encode(), base.dtype.encode(), config.kv_dtype.encode())
    pools = [views] if head_views is None else [views, head_views]
    memory = PinnedHostMemory(pools, accelerator, config.kv_host_bytes) if config.kv_host_bytes else None
    disk = None
    if memory is not None and config.kv_disk_bytes:
        disk = DiskPages(DiskFile(memory, Path(config.cache_dir), config.kv_disk_bytes, wake))
    prefixes = PrefixCache(pages, policy, base.target.geometry.page_tokens, identity, HostPages(memory, disk))
    kv = KvPages(pages, adapters.reclaimer, prefixes, cache, config.max_batch_tokens, partial(copy_page, views))
    limits = SchedulerLimits(config.max_batch_tokens, config.max_sequences, config.max_sequences)
    scheduler = Scheduler(queue, kv, adapters, limits)
    grammars = _grammars(config, model)
    parts = EngineParts(
        pages,
        adapters,
        prefixes,
        scheduler,
        executor,
        grammars,
        _speculation(base),
        host.protect,
    )
    traces = None if spans is None else SequenceTraces(spans)
    engine = Engine(
        limits=_limits(base),
        parts=parts,
        observers=Observers(_stats(parts, stager, _page_bytes(base), reads, graphs), traces, note_running),
        seeds=random.Random(config.seed),
        clock=time.monotonic,
        lookahead=backend.runs_ahead,
    )
    if isinstance(executor, DirectExecutor):
        executor.is_unwanted = engine.is_step_unwanted
    ready = _ready(base, pages.num_pages, prefixes.host, has_files=weights is None)
    return AssembledEngine(engine, adapters, grammars, stager, views, ready, prefixes.host.disk, workers, head_views)


def _pool_bytes(base: LoadedBase, cached_bytes: int = 0) -> int:
    """The size of the pools of all workers, which have as many pages each. Without a setting, it follows from the free
    memory of the GPU that has the least.

    `cached_bytes` is the memory that this worker has cached for activations. All others need as much, but only worker
    0 has cached it so far.
    """
    size, workers, memory = base.config.tensor_parallel_size, base.backend.workers, base.backend.accelerator.memory()
    if workers is not None and memory is not None:
        mine = torch.tensor([[memory.free + cached_bytes, cached_bytes, memory.total]], device=base.backend.device)
        free, cached, total = workers.join_columns(mine).view(size, 3).unbind(1)
        memory = DeviceMemory(int(free.min() - cached.max()), int(total.max()))
    return pool_bytes_of(base.config.pool_bytes, memory, size)


def _allocate_views(base: LoadedBase, num_bytes: int) -> tuple[PoolViews, PoolViews | None]:
    """The pool of this process, and that of the base's own head for drafts if it is used, which has as many pages.
    `num_bytes` is the size of the pools of all workers.
    """
    kv_dtype, adapter_dtype = pool_dtypes(base.config, base.dtype)
    geometry, head_geometry = base.target.geometry, _head_geometry(base)
    num_bytes //= base.config.tensor_parallel_size
    num_pages = num_bytes // _page_bytes(base)

    def allocate(geometry: PageGeometry, num_bytes: int) -> PoolViews:
        return allocate_pool(
            geometry,
            num_bytes,
            kv_dtype=kv_dtype,
            adapter_dtype=adapter_dtype,
            device=base.backend.device,
            has_cache_groups=base.decoder.cache_layout.has_pages_of_blocks,
        )

    if head_geometry is None:
        return allocate(geometry, num_bytes), None
    if num_pages < 1:
        raise PoolTooSmall(
            f"a pool of {num_bytes} bytes cannot hold a page of {_page_bytes(base)} bytes: raise pool_bytes"
        )
    views = allocate(geometry, num_pages * geometry.pool_page_bytes)
    return views, allocate(head_geometry, num_pages * head_geometry.pool_page_bytes)


def _head_runner(
    base: LoadedBase, tables: SlotTables, views: PoolViews, head_views: PoolViews | None
) -> HeadRunner | None:
    if base.head is None or head_views is None:
        return None
    # The drafters of adapters are in the outer pages of the adapters.
    kernels = base.backend.make_kernels(replace(head_views, adapter_views=views.flat), base.head.shapes)
    return HeadRunner(base.head, kernels, tables, base.backend.accelerator)


def _head_geometry(base: LoadedBase) -> PageGeometry | None:
    """The geometry of the pool of the base's own head for drafts, or None if it is not used."""
    if base.head is None:
        return None
    geometry = base.target.geometry
    return base.head.config.geometry(geometry.kv_itemsize, geometry.adapter_itemsize)


def _page_bytes(base: LoadedBase) -> int:
    """Bytes of a page, with the K and V of the base's own head for drafts if it is used."""
    head_geometry = _head_geometry(base)
    return base.target.geometry.pool_page_bytes + (0 if head_geometry is None else head_geometry.pool_page_bytes)


def _page_pool(views: PoolViews, cache: CacheLayout) -> PagePool:
    pages = PagePool(views.raw.shape[0])
    if pages.num_pages <= cache.num_state_pages:
        raise PoolTooSmall(
            f"the state of one sequence takes {cache.num_state_pages} pages, but a pool of "
            f"{in_gib(views.raw.nbytes)} has only {pages.num_pages}: raise pool_bytes"
        )
    return pages


def _limits(base: LoadedBase) -> EngineLimits:
    config, model = base.config, base.model
    return EngineLimits(
        model.vocab_size,
        base.max_model_len,
        model.eos_token_ids,
        base.target.geometry.page_tokens,
        config.max_waiting_tokens,
        math.inf if config.max_waiting_s is None else config.max_waiting_s,
        config.max_pinned_share,
        model.has_head,
    )


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _reads(base: LoadedBase, views: PoolViews, weight_bytes: int | None) -> ReadsPerStep | None:
    """What decode steps must read, or None if the device's bandwidth is not known. Overwrites the pool, whose pages
    have no owners yet.
    """
    if weight_bytes is None:
        return None
    bandwidth = base.backend.accelerator.bandwidth(views.raw.view(-1))
    if bandwidth is None:
        return None
    decoder, expert_bytes = base.decoder, base.decoder.expert_bytes
    # Most steps read only a part of the head for drafts.
    head_bytes = 0 if base.head is None else base.head.num_bytes
    return ReadsPerStep.of(
        base.model,
        weight_bytes=weight_bytes - decoder.embedding_bytes - expert_bytes - head_bytes,
        expert_bytes=expert_bytes,
        page_bytes=views.geometry.pool_page_bytes,
        cache=decoder.cache_layout,
        bandwidth=bandwidth,
    )


def _stats(
    parts: EngineParts, stager: Stager, page_bytes: int, reads: ReadsPerStep | None, graphs: Callable[[], GraphMemory]
) -> EngineStats:
    return EngineStats(
        parts.pages,
        parts.adapters,
        parts.prefixes,
        parts.scheduler,
        loading=stager.counts,
        contents=stager.contents,
        page_bytes=page_bytes,
        graphs=graphs,
        grammars=parts.grammars.counts,
        reads=reads,
        drafts=parts.speculation.counts,
    )


def _speculation(base: LoadedBase) -> Speculation:
    return Speculation(
        max_draft_rows(base.config, base.model, base.backend),
        guesses=_guesses(base) is not None,
        lookahead=base.backend.runs_ahead,
        has_head=base.head is not None,
    )


def _guesses(base: LoadedBase) -> str | None:
    if base.config.speculate == "off" or not max_draft_rows(base.config, base.model, base.backend):
        return None
    return "text" if base.head is None else "head"


def _ready(base: LoadedBase, num_pages: int, host: HostPages, has_files: bool) -> EngineReady:
    """Without `has_files`, the weights are not those of the model directory, and their digest is left out."""
    config, model_dir = base.config, Path(base.config.model_dir)
    return EngineReady(
        max_model_len=base.max_model_len,
        num_pages=num_pages,
        page_tokens=base.target.geometry.page_tokens,
        device=config.device,
        dtype=base.dtype,
        quantization=_quantization(base),
        adapter_dtype=config.adapter_dtype,
        kv_dtype=config.kv_dtype,
        num_kv_tokens=base.decoder.cache_layout.num_tokens(num_pages),
        num_host_kv_tokens=base.decoder.cache_layout.num_tokens(host.num_slots),
        num_disk_kv_tokens=base.decoder.cache_layout.num_tokens(host.disk.num_slots),
        num_dequantized=base.num_dequantized,
        model_sha256=model_sha256(model_dir),
        base_sha256=base_sha256(model_dir) if has_files else "",
        guesses=_guesses(base),
        max_sequences=config.max_sequences,
        ran_at_death=config.ran_at_death,
    )


def _quantization(base: LoadedBase) -> str | None:
    """The format of the weights, by the name that operators know, such as `int4` for weights quantised at startup.

    If activations, adapters or the KV cache are rounded too, their formats are appended, because the answers depend on
    all of them.
    """
    name = None if base.model.quantization is None else base.model.quantization.name
    if base.config.quantized_dir is not None:
        made = read_format(Path(base.config.quantized_dir))
        name = None if made is None else made.name.removeprefix("compressed-tensors ")
    kv_dtype = None if base.config.kv_dtype == "auto" else base.config.kv_dtype
    formats = {"activations": base.activations, "adapters": base.config.adapter_dtype, "KV cache": kv_dtype}
    rounded = [f"{what} in {form}" for what, form in formats.items() if form is not None]
    return ", ".join([name or "float", *rounded]) if rounded else name


def _grammars(config: EngineConfig, model: ModelConfig) -> Grammars:
    arguments = (str(Path(config.model_dir).absolute()), str(model.vocab_size), *map(str, model.eos_token_ids))
    command = (sys.executable, "-P", "-m", "loramux.engine.constraints.grammar_process", *arguments)
    if config.is_sandbox_required:
        command = (*command, REQUIRED)
    return Grammars(command, worker_environment(), model.vocab_size)


def _compile_programs(base: LoadedBase, tables: SlotTables) -> None:
    """On a GPU, compile the kernels of all shapes in parallel, so that the warm-up only loads them.

    The executor here does not launch kernels that need compiling, so their outputs are uninitialised. This is safe
    because a padding step uses no output as an index. The executor is not used afterwards, because it has recorded its
    shapes as warm. A failure is only reported on standard error, because the warm-up compiles missing kernels one at a
    time.
    """
    backend, compile_ahead = base.backend, base.backend.compile_ahead
    if not backend.compiles or compile_ahead is None:
        return
    views, head_views = _allocate_views(base, base.config.tensor_parallel_size * _page_bytes(base))
    kernels = backend.make_kernels(views, base.decoder.shapes)
    head = _head_runner(base, tables, views, head_views)
    executor = _make_executor(base, tables, kernels, base.decoder.with_few_layers(), head)
    if not isinstance(executor, GraphExecutor):
        return
    shapes = list(reachable_shapes(base.config.max_batch_tokens, base.config.max_sequences))
    try:
        compile_ahead(lambda: executor.warm_up(shapes, captures=False), num_cpus())
    except Exception as error:
        print(f"parallel compilation failed; compiling GPU programs one at a time: {error!r}", file=sys.stderr)


def _warm_up(executor: Executor, base: LoadedBase) -> None:
    """Load all kernels before the first request: run a prompt step, a decode step and, on a GPU, all reachable shapes.

    Writes K, V and any state to page 0, which has no owner yet. Raises ConfigNotUsable if a GPU lacks memory for a
    step.
    """
    config, cache = base.config, base.decoder.cache_layout
    with room_for_steps(config.max_batch_tokens), base.backend.reported_programs():
        for num_prompt in (2, 1):
            add = Add(sequence_id="", prompt=(0,) * num_prompt, max_tokens=1, sampling=SamplingParams())
            tables = [PageTable(block_list(cache.blocks(group, 0))) for group in cache.groups]
            sequence = Sequence(add=add, owner=b"", arrival=0, seed=0, slot=0, tables=tables)
            sequence.state_pages = block_list([0] * cache.num_state_pages)
            scheduled = [ScheduledSequence(sequence, num_prompt)]
            batch = build_batch(scheduled, cache.block_tokens)
            if base.head is not None:
                batch = msgspec.structs.replace(batch, head=head_rows(scheduled, num_prompt == 1))
            executor.submit(batch).choose().tokens()
        limits = config.max_batch_tokens, config.max_sequences
        if base.backend.compiles and isinstance(executor, GraphExecutor):
            executor.warm_up(reachable_shapes(*limits))
        elif base.backend.compiles and isinstance(executor, ParallelExecutor):
            executor.warm_up(*limits)


def _make_executor(
    base: LoadedBase, tables: SlotTables, kernels: Kernels, decoder: Decoder, head: HeadRunner | None = None
) -> Executor:
    config, accelerator, eos_token_ids = base.config, base.backend.accelerator, base.model.eos_token_ids
    sample_tokens = base.backend.sample_tokens
    if sample_tokens is None:
        start = base.backend.start_recording
        return DirectExecutor(
            decoder, kernels, tables, eos_token_ids, None if start is None else partial(start, kernels), head
        )
    cache = decoder.cache_layout
    buffer = StepBuffer(
        accelerator,
        config.max_batch_tokens,
        config.max_sequences,
        config.max_sequences * cache.max_blocks(base.max_model_len, config.max_batch_tokens),
        len(cache.groups),
        has_states=cache.num_state_pages > 0,
    )
    workers, max_sequences = base.backend.workers, config.max_sequences
    sampler = DeviceSampler(accelerator, sample_tokens, max_sequences, eos_token_ids, workers)
    return GraphExecutor(
        decoder,
        kernels,
        tables,
        accelerator,
        buffer,
        sampler,
        max_sequences,
        head=head,
        must_capture=workers is not None,
    )
