"""Configuration of one engine, parsed once from the command line and passed to the engine process as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from loramux.adapter_store.formats.packed.pack_target import FP8, PackTarget
from loramux.adapter_store.formats.quantization.base_format import rounds_inputs
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.cuda_driver import count_gpus, missing_for_cuda
from loramux.engine.device.machine_limits import free_memory, num_cpus
from loramux.engine.pages.eviction import MOST_PINNED_SHARE
from loramux.engine.pages.pool_size import in_gib, num_pages_in
from loramux.engine.parallel.sharding import check_sharding
from loramux.engine.protocol.errors import ConfigNotUsable, DeviceNotUsable, ModelNotSupported
from loramux.engine.tracing.spans import TraceConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2}

Speculate = Literal["off", "text", "head", "auto"]
KvDtype = Literal["auto", "int8"]
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)

DEFAULT_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}
"""Default of `max_batch_tokens`: enough rows to keep the device busy, but few enough that a prompt does not delay
decodes for long.
"""

DEFAULT_SEQUENCES = {"cpu": 64, "cuda": 256}

DEFAULT_SPECULATE: dict[str, Speculate] = {"cpu": "text", "cuda": "off"}
"""Default of `speculate` of servers and of `LLM`. Drafts have not been measured on a GPU."""

DEFAULT_HOST_TIER_BYTES = 1 << 30


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine. `dtype` applies to the weights and, by default, to the KV cache and the adapters in the
    pool.

    On a CPU, activations are always float32. Products with bfloat16 weights are computed in float32 unless the CPU has
    bfloat16 instructions. Raises ConfigNotUsable for settings that contradict each other or are out of range.
    """

    model_dir: str
    quantized_dir: str | None = None
    """Directory of quantised weights that replace the weights in `model_dir`, or None."""
    blob_url: str
    """URL of the blob store from which adapters are loaded: see `blob_url.py`."""
    cache_dir: str
    """The disk tier's directory. Engines of the same user on one host can share it."""
    program_dir: str | None = None
    """Directory for compiled GPU programs, unless TRITON_CACHE_DIR is set. None means Triton's default directory."""
    device: str = "cpu"
    gpus: tuple[int, ...] = ()
    """Indices of the GPUs of the engine's workers among those that the server sees. Its processes see no others. If
    empty, the workers use the first GPUs.
    """
    dtype: str = "bfloat16"
    adapter_dtype: Literal["fp8"] | None = None
    """`fp8` stores the adapters in the pool as FP8 codes. None stores them in `dtype`."""
    kv_dtype: KvDtype = "auto"
    """`int8` stores K and V as int8 codes, with a scale for each token and head. `auto` stores them in `dtype`."""
    activations: Literal["int8", "fp8", "16bit"] | None = None
    """On a CPU, `int8` rounds the inputs of quantised linear layers to 8 bits instead of 16. On a GPU, `fp8` rounds the
    inputs of linear layers with FP8 weights to FP8 in large steps, and None does so if the checkpoint says so. `16bit`
    does neither.
    """
    pool_bytes: int | None = None
    """Size of the page pool, of all workers together. None means 1 GiB on a CPU, or most of the memory that the model
    leaves free on a GPU.
    """
    max_model_len: int | None = None
    """Longest context of a sequence, in tokens. None means the model's own limit."""
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS["cpu"]
    """Maximum number of token rows in one step. Decode rows come first, then prompt chunks."""
    max_sequences: int = DEFAULT_SEQUENCES["cpu"]
    """Maximum number of sequences that run at the same time. Further sequences wait."""
    max_waiting_tokens: int = 1 << 22
    """Limit on the tokens (prompt plus grant) of requests waiting for their first step. Beyond it, requests are refused
    as `overloaded`.
    """
    max_waiting_s: float | None = 300.0
    """Seconds that a request can wait for its first step before it is refused as `overloaded`. None means no limit."""
    eviction_policy: str = "lru"
    """Order in which idle adapters and cached prefixes are evicted. See `eviction.py`."""
    max_resident_adapters: int = 256
    """Number of slots in the adapter tables."""
    max_pinned_share: float = 0.5
    """Largest share of the pool's pages, and of the slots, that pinned adapters may take. 0 refuses every pin."""
    disk_tier_bytes: int = 16 << 30
    host_tier_bytes: int = DEFAULT_HOST_TIER_BYTES
    kv_host_bytes: int = 0
    """Size of the host memory for prefix pages that the pool evicts. 0 turns it off."""
    kv_disk_bytes: int = 0
    """Size of the file, in `cache_dir`, for prefix pages that this host memory evicts. 0 turns it off."""
    num_threads: int = msgspec.field(default_factory=num_cpus)
    tensor_parallel_size: int = 1
    """Number of processes that divide the model's linear layers, the pool and the threads among themselves."""
    pdl: bool = True
    """Overlap the launches of kernels (programmatic dependent launch) on GPUs of compute capability 9.0 or later."""
    fused_lora: bool = False
    """Multiply float linear layers and their adapters in one kernel in steps of up to 128 tokens, on a GPU."""
    speculate: Speculate = "off"
    """`text` drafts tokens from the text of each sequence, `head` with the base's own head for drafts, and `auto` with
    the head if the base has one that can be used, otherwise from the text. A step verifies several tokens.
    """
    num_loaders: int = 4
    """Number of adapters that the staging process loads in parallel, each on its own thread."""
    ran_at_death: tuple[str, ...] = ()
    """Ids of the sequences that were running when the previous engine died. They are reported to gateways."""
    is_sandbox_required: bool = False
    """Refuse grammars if the processes that follow them lack an essential measure of the sandbox."""
    traces: TraceConfig | None = None
    """Export settings for the spans of traced requests. If None, tracing is off and OpenTelemetry is not imported."""
    seed: int = 0
    """Seeds the random streams of requests without a seed of their own."""

    def __post_init__(self) -> None:
        if self.max_batch_tokens < self.max_sequences:
            # Every running sequence needs a row in each step. Otherwise, the last sequences would never make progress.
            raise ConfigNotUsable(
                f"max_batch_tokens ({self.max_batch_tokens}) is less than max_sequences ({self.max_sequences}): "
                "some running sequences would never get a row in a step; raise max_batch_tokens or lower max_sequences"
            )
        if not 0 <= self.max_pinned_share <= MOST_PINNED_SHARE:
            raise ConfigNotUsable(f"max_pinned_share {self.max_pinned_share} is outside [0, {MOST_PINNED_SHARE}]")
        if self.kv_disk_bytes and not self.kv_host_bytes:
            raise ConfigNotUsable(
                "kv_disk_bytes keeps the pages that the main memory of kv_host_bytes evicts: set kv_host_bytes, too, "
                "or omit kv_disk_bytes"
            )


def resolve_device(requested: str, gpus: Iterable[int] = (0,)) -> str:
    """Resolve `auto` to `cuda` if this installation can use these GPUs of the machine, otherwise to `cpu`.

    Raises DeviceNotUsable if `cuda` was requested but cannot be used, or if the request is none of the three.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise DeviceNotUsable(
            f"there is no device {requested!r}: use auto, cpu or cuda, which is the first visible GPU"
        )
    if requested == "cpu":
        return "cpu"
    missing = missing_for_cuda(gpus)
    if missing is None:
        return "cuda"
    if requested == "cuda":
        raise DeviceNotUsable(missing)
    return "cpu"


def resolve_dtype(requested: str, model: ModelConfig, device: str) -> str:
    """Resolve `auto` to the model's dtype.

    Engines do not support float16: a model's float16 becomes float32 on a CPU and bfloat16 on a GPU. Raises
    ModelNotSupported for another dtype.
    """
    dtype = requested
    if requested == "auto":
        dtype = model.dtype
        if dtype == "float16":
            dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype not in ITEMSIZE:
        raise ModelNotSupported(f"the dtype {dtype!r} is not supported: use auto, float32 or bfloat16")
    return dtype


def activation_bits(config: EngineConfig, model: ModelConfig) -> Literal[8, 16]:
    """Number of bits to which the inputs of quantised linear layers may be rounded.

    Without a setting, a GPU rounds them to 8 bits if the checkpoint says so. Raises an EngineError for a setting that
    does not fit the device or the base.
    """
    dtype = resolve_dtype(config.dtype, model, config.device)
    if config.activations is not None:
        is_quantized = config.quantized_dir is not None or model.quantization is not None
        check_activations(msgspec.structs.replace(config, dtype=dtype), is_quantized)
        return 16 if config.activations == "16bit" else 8
    is_default = config.device != "cpu" and config.quantized_dir is None and rounds_inputs(model.quantization)
    return 8 if is_default and dtype == "bfloat16" else 16


def check_activations(config: EngineConfig, is_quantized: bool) -> None:
    """Raise an EngineError if activations cannot be rounded as configured with this device and base.

    `config.dtype` must be resolved.
    """
    name = config.activations
    if name is None or name == "16bit":
        return
    if (name == "int8") != (config.device == "cpu"):
        needed, used = ("CPU", "GPU") if name == "int8" else ("GPU", "CPU")
        raise DeviceNotUsable(
            f"activations in {name} need a {needed}, but this engine uses a {used}: omit --activations"
        )
    if not is_quantized:
        raise ConfigNotUsable(
            f"activations in {name} need quantised weights: add --quantization, or omit --activations"
        )
    if name == "fp8":
        if config.dtype != "bfloat16":
            raise ConfigNotUsable(
                f"activations in fp8 need bfloat16, but the dtype is {config.dtype}: omit --dtype or --activations"
            )
        return
    # Imported here because an engine on a GPU does not need llvmlite.
    from loramux.kernels.cpu.instructions.capability import byte_products, host_features

    if byte_products(host_features()) is None:
        raise DeviceNotUsable("activations in int8 need a CPU with AVX2 or AVX512_VNNI: omit --activations")


def check_workers(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigNotUsable if `tensor_parallel_size` workers cannot share this base on this device."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    if config.speculate == "head":
        raise ConfigNotUsable(
            "the workers of a tensor-parallel engine cannot divide the base's head for drafts: use --speculate text or "
            "auto, or omit tensor_parallel_size"
        )
    if config.kv_host_bytes:
        raise ConfigNotUsable(
            "several workers cannot keep keys and values in host memory so far: omit kv_host_bytes or "
            "tensor_parallel_size"
        )
    if config.num_threads < size:
        raise ConfigNotUsable(
            f"{size} workers need a thread each, but num_threads is {config.num_threads}: lower tensor_parallel_size"
        )
    check_sharding(model, size)


def check_gpus(config: EngineConfig) -> None:
    """Raise ConfigNotUsable if this process sees fewer GPUs than the engine has workers."""
    size = config.tensor_parallel_size
    if config.device == "cuda" and (num_gpus := count_gpus()) < size:
        raise ConfigNotUsable(
            f"{size} workers need a GPU each, but this process sees {num_gpus}: lower tensor_parallel_size"
        )


def check_host_page(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigNotUsable if `kv_host_bytes` or `kv_disk_bytes` is set and is less than a page takes."""
    if not config.kv_host_bytes:
        return
    dtype = resolve_dtype(config.dtype, model, config.device)
    geometry = pack_target(model, dtype, config.adapter_dtype, config.kv_dtype).geometry
    page_bytes = geometry.pool_page_bytes
    if config.speculate == "head" and model.draft_head is not None:
        # A page has the K and V of the base's own head, too. Whether `auto` uses it is known only later.
        page_bytes += model.draft_layer.geometry(geometry.kv_itemsize, geometry.adapter_itemsize).pool_page_bytes
    num_pages_in(config.kv_host_bytes, page_bytes)
    if config.kv_disk_bytes:
        num_pages_in(config.kv_disk_bytes, page_bytes, "kv_disk_bytes")


def check_kv_host_bytes(config: EngineConfig) -> None:
    """Raise ConfigNotUsable if this machine lacks the memory for `kv_host_bytes`."""
    if not config.kv_host_bytes:
        return
    available = free_memory()
    if config.kv_host_bytes > available:
        raise ConfigNotUsable(
            f"kv_host_bytes is {in_gib(config.kv_host_bytes)}, but only {in_gib(available)} of memory are available: "
            "lower it"
        )


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest context of a sequence in tokens, prompt and answer together."""
    if config.max_model_len is None:
        return model.max_model_len
    if not 1 <= config.max_model_len <= model.stretched_model_len:
        raise ModelNotSupported(
            f"max_model_len {config.max_model_len} is outside [1, {model.stretched_model_len}], "
            "the range that the model supports"
        )
    return config.max_model_len


def kv_itemsize(dtype: str, kv_dtype: KvDtype) -> int:
    """Bytes of an element of K or V."""
    return ITEMSIZE[dtype] if kv_dtype == "auto" else 1


def pack_target(
    model: ModelConfig,
    dtype: str,
    adapter_dtype: Literal["fp8"] | None = None,
    kv_dtype: KvDtype = "auto",
) -> PackTarget:
    """The layout in which adapters must be packed so that an engine of this dtype can load them."""
    is_fp8 = adapter_dtype is not None
    geometry = model.geometry(kv_itemsize(dtype, kv_dtype), 1 if is_fp8 else ITEMSIZE[dtype])
    return PackTarget(
        modules=model.modules,
        geometry=geometry,
        dtype=FP8 if is_fp8 else dtype,
        outer_modules=model.outer_modules,
        tied_embeddings=model.tied_embeddings,
        experts=model.experts,
        has_fixed_vocabulary=model.layer_input_size > 0,
        norms=model.norm_shapes,
        draft_modules=model.draft_modules,
    )
