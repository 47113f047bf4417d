"""How one engine runs; parsed once by the command line, handed to the engine process as JSON."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.engine.device.cuda_driver import missing_for_cuda
from loramux.engine.errors import ConfigNotUsable, DeviceNotUsable, ModelNotSupported
from loramux.engine.model.model_config import ModelConfig
from loramux.engine.tracing.spans import TraceConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2}

DEFAULT_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}
"""Token rows of a step by device: enough to keep it busy, few enough that decodes do not wait long behind a prompt."""

DEFAULT_SEQUENCES = {"cpu": 64, "cuda": 256}

MOST_PINNED_SHARE = 0.9
"""Adapters that nobody pinned, and what sequences compute, need room as well."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine. `dtype` is that of the weights' values, the KV cache and the adapters in the pool.

    On a CPU, activations are float32 whatever the dtype; a CPU that cannot multiply bfloat16 multiplies in float32.
    Raises ConfigNotUsable for settings that contradict each other.
    """

    model_dir: str
    blob_url: str
    """Where adapters come from: `file://DIR` or `s3://BUCKET/PREFIX`."""
    cache_dir: str
    """The disk tier's directory, which engines of one host and user may share."""
    program_dir: str | None = None
    """Where a GPU's compiled programs are kept, unless TRITON_CACHE_DIR is set; None: where Triton keeps them."""
    device: str = "cpu"
    dtype: str = "bfloat16"
    pool_bytes: int | None = None
    """None: 1 GiB in host memory, or on a GPU most of what the model leaves free."""
    max_model_len: int | None = None
    """None: the model's own."""
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS["cpu"]
    """Token rows of one step: decode rows first, prompt chunks in the rest."""
    max_sequences: int = DEFAULT_SEQUENCES["cpu"]
    """Sequences that run at once; further ones wait."""
    max_waiting_tokens: int = 1 << 22
    """Prompts and grants that may wait for their first step; what exceeds it is refused as `overloaded`."""
    max_waiting_s: float = 300.0
    """How long a request may wait for its first step before it is refused as `overloaded`."""
    eviction_policy: Literal["lru", "greedy_dual"] = "lru"
    """What gives way first when pages are needed: see `eviction.py`."""
    max_resident_adapters: int = 256
    """Slots of the adapter tables."""
    max_pinned_share: float = 0.5
    """Of the pool's pages and of the slots, each: what pinned adapters may take at most; 0 refuses every pin."""
    disk_tier_bytes: int = 16 << 30
    host_tier_bytes: int = 1 << 30
    num_threads: int = msgspec.field(default_factory=lambda: len(os.sched_getaffinity(0)))
    pdl: bool = False
    """Overlap the launches of LoRA kernels (programmatic dependent launch), on GPUs of capability 9.0 or later."""
    num_loaders: int = 4
    """Adapters that the staging process brings at a time, on a thread each."""
    ran_at_death: tuple[str, ...] = ()
    """What its supervisor found running when the engine before this one died; gateways are told."""
    traces: TraceConfig | None = None
    """Where spans of traced requests go; None: nowhere, and OpenTelemetry is not imported."""
    seed: int = 0
    """Root of the streams of requests that bring no seed of their own."""

    def __post_init__(self) -> None:
        if self.max_batch_tokens < self.max_sequences:
            # Each running sequence has a row in each step: without one, the last ones would never get on.
            raise ConfigNotUsable(
                f"max_batch_tokens is {self.max_batch_tokens}, less than max_sequences, which is {self.max_sequences}: "
                "some running sequences would never get a row of a step; raise the one or lower the other"
            )
        if not 0 <= self.max_pinned_share <= MOST_PINNED_SHARE:
            raise ConfigNotUsable(f"max_pinned_share {self.max_pinned_share} is outside [0, {MOST_PINNED_SHARE}]")


def resolve_device(requested: str) -> str:
    """Turn `auto` into `cuda` where this installation can use a GPU of this machine, else into `cpu`.

    Raises DeviceNotUsable when `cuda` was asked for and cannot be used.
    """
    if requested == "cpu":
        return "cpu"
    missing = missing_for_cuda()
    if missing is None:
        return "cuda"
    if requested == "cuda":
        raise DeviceNotUsable(missing)
    return "cpu"


def resolve_dtype(requested: str, model: ModelConfig, device: str) -> str:
    """Turn `auto` into the model's own dtype; float16 weights run as float32 on a CPU, which has no kernels for it."""
    dtype = model.dtype if requested == "auto" else requested
    if dtype == "float16":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype not in ITEMSIZE:
        raise ModelNotSupported(f"the dtype {requested!r} is not supported: use auto, float32 or bfloat16")
    return dtype


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest context that a sequence may reach, prompt and answer together."""
    if config.max_model_len is None:
        return model.max_model_len
    if not 1 <= config.max_model_len <= model.max_model_len:
        raise ModelNotSupported(
            f"max_model_len {config.max_model_len} is outside [1, {model.max_model_len}], the model's own limit"
        )
    return config.max_model_len


def pack_target(model: ModelConfig, dtype: str) -> PackTarget:
    """What adapters must be packed for, so that an engine of this dtype can load them."""
    geometry = model.geometry(ITEMSIZE[dtype], ITEMSIZE[dtype])
    return PackTarget(modules=model.modules, geometry=geometry, dtype=dtype, outer_modules=model.outer_modules)
