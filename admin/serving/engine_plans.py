"""Plans what each engine of a server gets: its threads or its GPU, and its memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loramux.admin.errors import StartRefused
from loramux.admin.server.settings import Settings
from loramux.engine.device.cuda_driver import count_gpus
from loramux.engine.device.machine_limits import free_memory
from loramux.engine.loop.config import EngineConfig
from loramux.engine.pages.pool_size import in_gib
from loramux.engine.protocol.errors import EngineError


def plan_engines(settings: Settings, config: EngineConfig) -> Sequence[EngineConfig]:
    """Return the configuration of each engine, derived from that of a single engine. Raises StartRefused if this
    machine cannot run them.

    On a CPU, the engines divide the threads, and the memory of all of them must be available. On GPUs, each of an
    engine's workers has its own. The pool and the host tiers have the configured sizes in each engine.
    """
    num_engines = settings.data_parallel_size or max(1, len(settings.devices) // config.tensor_parallel_size)
    _check_disk(config, num_engines)
    if config.device == "cuda":
        return _on_gpus(settings, config, num_engines)
    if num_engines == 1:
        if config.kv_host_bytes:
            _check_memory(settings, config, num_engines)
        return (config,)
    if config.num_threads < num_engines * config.tensor_parallel_size:
        given = f"this process may use {config.num_threads} CPUs (its container's limit): set num_threads, or"
        if settings.num_threads is not None:
            given = f"num_threads is {config.num_threads}:"
        takers = f"{num_engines} engines"
        if config.tensor_parallel_size > 1:
            takers = f"the {config.tensor_parallel_size} workers of each of {takers}"
        raise StartRefused(f"{takers} need a thread each, but {given} lower data_parallel_size")
    _check_memory(settings, config, num_engines)
    return (msgspec.structs.replace(config, num_threads=config.num_threads // num_engines),) * num_engines


def _on_gpus(settings: Settings, config: EngineConfig, num_engines: int) -> Sequence[EngineConfig]:
    num_gpus = count_gpus()
    for device in settings.devices:
        if device >= num_gpus:
            raise StartRefused(
                f"there is no GPU {device}: this machine has {num_gpus}, numbered from 0; change devices"
            )
    num_workers = config.tensor_parallel_size
    if num_engines * num_workers > num_gpus:
        needed, setting = f"{num_engines} engines need as many GPUs", "data_parallel_size"
        if num_workers > 1:
            engines = "" if num_engines == 1 else f" of each of {num_engines} engines"
            setting = "tensor_parallel_size" if num_engines == 1 else f"{setting} or tensor_parallel_size"
            needed = f"the {num_workers} workers{engines} need a GPU each"
        raise StartRefused(f"{needed}, but this machine has {num_gpus}: lower {setting}")
    host_bytes = num_engines * (config.kv_host_bytes + config.host_tier_bytes)
    if config.kv_host_bytes and host_bytes > (available := free_memory()):
        raise StartRefused(
            f"the host tiers of {num_engines} engines need {in_gib(host_bytes)} of memory, but {in_gib(available)} are "
            "available: lower kv_host_bytes or host_tier_bytes"
        )
    if num_engines == 1 and not settings.devices:
        return (config,)
    num_threads = max(num_workers, config.num_threads // num_engines)
    devices = settings.devices or range(num_engines * num_workers)
    return [
        msgspec.structs.replace(config, gpus=tuple(devices[begin : begin + num_workers]), num_threads=num_threads)
        for begin in range(0, len(devices), num_workers)
    ]


def _check_disk(config: EngineConfig, num_engines: int) -> None:
    if not config.kv_disk_bytes:
        return
    place = next(path for path in (Path(config.cache_dir), *Path(config.cache_dir).parents) if path.exists())
    needed, free = num_engines * config.kv_disk_bytes, shutil.disk_usage(place).free
    if needed > free:
        raise StartRefused(
            f"kv_disk_bytes needs {in_gib(needed)} of disk space, but {in_gib(free)} are free in {place}: lower it, or "
            "set disk_tier_dir to a directory on a larger disk"
        )


def _check_memory(settings: Settings, config: EngineConfig, num_engines: int) -> None:
    # Other servers do not need this module, and importing it takes time.
    from loramux.admin.doctor.memory_plan import plan_engine

    try:
        plan = plan_engine(config, settings.quantization)
    except EngineError as error:
        raise StartRefused(str(error)) from error
    if plan.problem is not None:
        raise StartRefused(plan.problem)
    needed = plan.main_memory(config.device, num_engines, config.host_tier_bytes)
    available = free_memory()
    if needed > available:
        takers, fewer = f"{num_engines} engines need", "data_parallel_size, "
        if num_engines == 1:
            takers, fewer = "the engine needs", ""
        raise StartRefused(
            f"{takers} {in_gib(needed)} of memory, with {in_gib(plan.all_weights)} of weights, "
            f"{in_gib(plan.pool)} of pages and {in_gib(config.host_tier_bytes + plan.kv_host)} of host tier each, but "
            f"{in_gib(available)} are available: lower {fewer}pool_bytes, host_tier_bytes or "
            "kv_host_bytes"
        )
