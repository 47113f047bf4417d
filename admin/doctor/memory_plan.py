"""Computes how much memory a server takes with each format of a model's weights, from the headers of its files."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.quantization.base_format import CheckpointTensors, kind_of
from loramux.adapter_store.formats.quantization.divided import divided
from loramux.adapter_store.formats.quantization.mxfp4 import Mxfp4Experts
from loramux.adapter_store.formats.quantization.parts import CodedWeight
from loramux.adapter_store.formats.quantization.reordered import ReorderedWeight
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import EMBEDDING, HEAD, checkpoint_of, stored_tensors
from loramux.engine.architectures.weight_shapes import check_shapes, weight_shapes
from loramux.engine.decoder.kv_layout import kv_layout
from loramux.engine.loop.config import (
    DEFAULT_HOST_TIER_BYTES,
    ITEMSIZE,
    KV_DTYPES,
    EngineConfig,
    kv_itemsize,
    pack_target,
    resolve_dtype,
)
from loramux.engine.pages.pool_size import DEFAULT_BYTES
from loramux.engine.parallel.sharding import check_sharding, worker_config
from loramux.engine.parallel.weight_parts import weight_parts
from loramux.engine.protocol.errors import ConfigNotUsable, EngineError, ModelNotSupported
from loramux.engine.quantizing.methods import CHOICES, HEAD_METHOD, METHODS, WITH_HEAD
from loramux.engine.quantizing.quantize import quantized_names, shared_group
from loramux.engine.quantizing.sensitivity import EXTRA_BYTES
from loramux.kernels.cpu.instructions.capability import host_features, integer_products
from loramux.kernels.cpu.linear.code_groups import groups_of
from loramux.kernels.gpu.linear.code_layout import can_place, placed_bytes
from loramux.kernels.quantized import QuantizedWeight

PROCESS_BYTES = 765 << 20
"""Memory of a server's processes without the model, pool and host tier, in bytes. Measured on Linux with Python 3.11
and without a GPU.
"""

GATEWAY_BYTES = 192 << 20
"""The part of PROCESS_BYTES that a server has once, however many engines it has: its gateway's processes."""

WORKER_BYTES = 300 << 20
"""Memory of a further worker's process without weights and pool, in bytes. Measured like PROCESS_BYTES."""

NUM_ADAPTERS, ADAPTER_RANK = 16, 16
"""The adapters in a plan of several workers: their number, and their rank on all linear layers."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory in bytes that a server takes with one format of weights; `problem` says why a format cannot be used.

    `weights` are those of each of `num_workers` workers, and include its embedding and its head. `pool` is the page
    pool of all workers together. `kv_host` is the host memory for evicted K and V, and `process` is everything else
    without the host tier of adapters.
    """

    format: str
    weights: int = 0
    pool: int = 0
    process: int = 0
    num_workers: int = 1
    kv_host: int = 0
    problem: str | None = None

    @property
    def all_weights(self) -> int:
        """Bytes of the weights of an engine's workers together."""
        return self.num_workers * self.weights

    @property
    def worker(self) -> int:
        """Bytes of a worker's weights and of its share of the pool."""
        return self.weights + self.pool // self.num_workers

    @property
    def total(self) -> int:
        return self.all_weights + self.pool + self.process + self.kv_host

    def total_of(self, num_engines: int) -> int:
        """Return the memory of a server with several engines, in bytes. Each has its own weights and pool."""
        return self.total + (num_engines - 1) * (self.total - GATEWAY_BYTES)

    def main_memory(self, device: str, num_engines: int = 1, host_tier_bytes: int = DEFAULT_HOST_TIER_BYTES) -> int:
        """Return the main memory that a server with several engines takes, in bytes, with a full host tier of adapters
        in each. On GPUs, these are only the host tiers.
        """
        on_host = self.total_of(num_engines) if device == "cpu" else num_engines * self.kv_host
        return on_host + num_engines * host_tier_bytes


@dataclass(frozen=True, slots=True)
class WorkersPlan:
    """What the workers of a tensor-parallel engine exchange in a step, and what they have several times.

    The workers add up outputs `num_sums` times, `sum_bytes` for each token of the step, and join `join_bytes` of logits
    once for each sampled token. `embedding_bytes` is the embedding in a format without quantisation, which each worker
    has as a whole. `adapter_bytes` are the pages of NUM_ADAPTERS adapters in each worker, and `whole_adapter_bytes`
    those in an engine with one worker.
    """

    num_sums: int
    sum_bytes: int
    join_bytes: int
    embedding_bytes: int
    adapter_bytes: int
    whole_adapter_bytes: int


def has_products_by_codes(device: str) -> bool:
    """Return whether the device computes with quantised weights. If not, they are dequantised when loaded."""
    return device != "cpu" or integer_products(host_features()) is not None


def plan_memory(
    model_dir: Path,
    device: str,
    pool_bytes: int | None = None,
    max_model_len: int | None = None,
    num_workers: int = 1,
    kv_host_bytes: int = 0,
    dtype: str = "auto",
) -> list[MemoryPlan]:
    """Return plans for bfloat16, for the checkpoint's own format in `dtype` and, if the checkpoint is not quantised,
    for each value of `--quantization`, whose other weights have `dtype`.

    Reads the headers and, in a quantised checkpoint, the first weight of each kind. Raises EngineError if the model is
    not supported, or if `num_workers` workers cannot divide it.
    """
    model_dir = model_directory(model_dir)
    config = ModelConfig.load(model_dir)
    if num_workers > 1:
        check_sharding(config, num_workers)
    check_shapes(config, stored_tensors(model_dir))
    checkpoint = checkpoint_of(model_dir)
    keeps = has_products_by_codes(device)
    rotary = _rotary_bytes(config, max_model_len or config.max_model_len)
    process = PROCESS_BYTES + rotary + (num_workers - 1) * (WORKER_BYTES + rotary)
    pool = DEFAULT_BYTES if pool_bytes is None else pool_bytes

    def plan(name: str, dtype: str, codes: dict[str, int]) -> MemoryPlan:
        weights = _Sizes(config, dtype, device, num_workers).total(codes)
        return MemoryPlan(name, weights, pool, process, num_workers)

    own = resolve_dtype(dtype, config, device)
    plans = [plan("bfloat16", "bfloat16", {})]
    for method in CHOICES if config.quantization is None else ():
        try:
            codes = _method_bytes(config, method, device, num_workers) if keeps else {}
        except EngineError as error:
            plans.append(MemoryPlan(method, problem=str(error)))
        else:
            plans.append(plan(method, own, codes))
    if config.quantization is not None:
        try:
            codes = _coded_bytes(checkpoint, config, device, num_workers) if keeps else {}
        except BaseNotSupported as error:
            raise ModelNotSupported(str(error)) from error
        plans.append(plan(config.quantization.name, own, codes))
    elif own != "bfloat16":
        plans.append(plan(own, own, {}))
    return [replace(plan, kv_host=kv_host_bytes) for plan in plans]


def plan_engine(config: EngineConfig, method: str | None) -> MemoryPlan:
    """Return the plan for the format of an engine's weights. `method` is the value of `--quantization`, if it is set.

    Raises EngineError like `plan_memory`. The plan's `problem` says why `method` cannot be used.
    """
    model_dir, num_workers = Path(config.model_dir), config.tensor_parallel_size
    plans = plan_memory(
        model_dir,
        config.device,
        config.pool_bytes,
        config.max_model_len,
        num_workers,
        config.kv_host_bytes,
        config.dtype,
    )
    model = ModelConfig.load(model_dir)
    name = method or (config.dtype if model.quantization is None else model.quantization.name)
    return next(plan for plan in plans if plan.format == name)


def plan_workers(model_dir: Path, device: str, num_workers: int) -> WorkersPlan:
    """Return the plan of a tensor-parallel engine that `check_sharding` accepts. Raises ModelNotSupported."""
    config = ModelConfig.load(model_directory(model_dir))
    dtype = resolve_dtype("auto", config, device)
    # On a CPU, activations are float32.
    itemsize = 4 if device == "cpu" else ITEMSIZE[dtype]
    return WorkersPlan(
        # Each layer adds up the outputs of its attention and of its feed-forward block.
        num_sums=2 * config.num_layers,
        sum_bytes=itemsize * config.hidden_size,
        join_bytes=itemsize * num_workers * _head_rows(config, num_workers),
        embedding_bytes=ITEMSIZE[dtype] * config.vocab_size * config.hidden_size,
        adapter_bytes=_adapter_bytes(worker_config(config, num_workers), dtype),
        whole_adapter_bytes=_adapter_bytes(config, dtype),
    )


def plan_tokens(model_dir: Path, device: str, pool_bytes: int | None = None, num_workers: int = 1) -> dict[str, int]:
    """Return how many tokens of K and V fit into an empty pool, by value of `--kv-dtype`. Raises ModelNotSupported."""
    config = worker_config(ModelConfig.load(model_directory(model_dir)), num_workers)
    of_worker = (DEFAULT_BYTES if pool_bytes is None else pool_bytes) // num_workers
    dtype = resolve_dtype("auto", config, device)
    tokens: dict[str, int] = {}
    for kv_dtype in KV_DTYPES:
        itemsize = kv_itemsize(dtype, kv_dtype)
        page_bytes = config.geometry(itemsize, ITEMSIZE[dtype]).pool_page_bytes
        layout = kv_layout(config, config.max_model_len, itemsize)
        tokens[kv_dtype] = layout.num_tokens(of_worker // page_bytes)
    return tokens


class _Sizes:
    """The sizes of the weights that each worker of an engine has in memory."""

    def __init__(self, config: ModelConfig, dtype: str, device: str, num_workers: int) -> None:
        self._itemsize = ITEMSIZE[dtype]
        own = weight_shapes(worker_config(config, num_workers))
        self._elements = {name: math.prod(shape) for name, shape in own.items()}
        # A CPU also keeps a tied head as a copy of the embedding that is laid out for matrix products, and a worker its
        # share of the rows.
        if num_workers > 1 or (device == "cpu" and HEAD not in self._elements):
            self._elements[HEAD] = _head_rows(config, num_workers) * config.hidden_size

    def total(self, codes: dict[str, int]) -> int:
        """Return the size of all weights in bytes. `codes` gives the sizes of the weights that stay quantised."""
        sizes = {name: self._itemsize * count for name, count in self._elements.items()}
        # A head that is tied to the embedding can be quantised separately.
        return sum({**sizes, **{name: size for name, size in codes.items() if name in {*sizes, HEAD}}}.values())


def _head_rows(config: ModelConfig, num_workers: int) -> int:
    """Return the number of rows of the head that each worker has."""
    return -(-config.vocab_size // num_workers)


def _adapter_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the size of the pages of NUM_ADAPTERS adapters in a pool, in bytes."""
    target = pack_target(config, dtype)
    layout = target.layout(target.equal_ranks(ADAPTER_RANK))
    return NUM_ADAPTERS * layout.num_pages * target.geometry.pool_page_bytes


def _method_bytes(config: ModelConfig, method: str, device: str, num_workers: int) -> dict[str, int]:
    """Return the size in bytes of each weight that stays quantised on the device, in each worker."""
    own = weight_shapes(worker_config(config, num_workers))
    linears, group = METHODS[method.removesuffix(WITH_HEAD)], shared_group(config, method, num_workers)
    shapes = {name: own[name] for name in quantized_names(config)}
    # A CPU dequantises FP8.
    kept = {} if linears is METHODS["fp8"] and device == "cpu" else shapes
    # A few weights of an int4 model may get 8 bits. Which ones depends on their values, so the plan allows for all.
    allowance = 1 if group is None else 1 + EXTRA_BYTES
    sizes = {
        name: math.ceil(allowance * linears.nbytes(out, in_features, group))
        for name, (out, in_features) in kept.items()
    }
    if method.endswith(WITH_HEAD):
        sizes[HEAD] = HEAD_METHOD.nbytes(_head_rows(config, num_workers), config.hidden_size, None)
    return sizes


def _coded_bytes(checkpoint: CheckpointTensors, config: ModelConfig, device: str, num_workers: int) -> dict[str, int]:
    """Return the size in bytes of each weight that stays quantised, in each worker. Only the first weight of each kind
    is read.
    """
    parts = weight_parts(config, num_workers, 0, has_own_head=True) if num_workers > 1 else {}
    known: dict[object, int | None] = {}
    sizes: dict[str, int] = {}
    for name, coded in checkpoint.coded.items():
        if name == EMBEDDING:
            continue
        kind = kind_of(name, coded)
        if kind not in known:
            weight, part = coded.read(), parts.get(name)
            if part is not None:
                try:
                    weight = divided(weight, part.axis, part.ranges)
                except ValueError as error:
                    raise ConfigNotUsable(
                        f"{num_workers} workers cannot divide the quantised weight {name}: {error}"
                    ) from error
            known[kind] = _kept_bytes(weight, device)
        kept = known[kind]
        if kept is not None:
            sizes[name] = kept
    return sizes


def _kept_bytes(weight: CodedWeight, device: str) -> int | None:
    """Return the size in bytes of a weight that stays quantised on the device, or None if it is dequantised."""
    if isinstance(weight, Mxfp4Experts):
        # A CPU gives the scales of all experts the size that the widest need.
        sizes = [_kept_bytes(expert, device) for expert in weight.experts]
        known = [size for size in sizes if size is not None]
        return max(known) * len(sizes) if len(known) == len(sizes) else None
    if isinstance(weight, ReorderedWeight):
        weight = weight.by_group
    if not isinstance(weight, QuantizedWeight):
        return None
    if device != "cpu":
        return placed_bytes(weight) if can_place(weight) else None
    groups = groups_of(weight)
    return None if groups is None else weight.codes.nbytes + groups.nbytes


def _rotary_bytes(config: ModelConfig, max_len: int) -> int:
    """Return the size of the float32 tables of cosines and sines, in bytes."""
    pairs = sum(
        1 if rope.kind == "none" else int(config.attention.head_dim * rope.rotary_fraction) // 2
        for rope in dict.fromkeys(config.attention.ropes)
    )
    return 2 * 4 * max_len * pairs
