"""Computes how much memory a server takes with each format of a model's weights, from the headers of its files."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.quantization.base_format import CheckpointTensors
from loramux.adapter_store.formats.quantization.mxfp4 import Mxfp4Experts
from loramux.adapter_store.formats.quantization.parts import CodedWeight
from loramux.adapter_store.formats.quantization.reordered import ReorderedWeight
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import EMBEDDING, HEAD, checkpoint_of, stored_tensors
from loramux.engine.architectures.weight_shapes import check_shapes, weight_shapes
from loramux.engine.decoder.kv_layout import kv_layout
from loramux.engine.loop.config import ITEMSIZE, KV_DTYPES, EngineConfig, kv_itemsize, resolve_dtype
from loramux.engine.pages.pool_size import DEFAULT_BYTES
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.engine.quantizing.methods import CHOICES, HEAD_METHOD, METHODS, WITH_HEAD
from loramux.engine.quantizing.quantize import quantized_names
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

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory in bytes that a server takes with one format of weights; `problem` says why a format cannot be used.

    `weights` includes the embedding and the head. `kv_host` is the host memory for evicted K and V, and
    `process` is everything else without the host tier of adapters.
    """

    format: str
    weights: int = 0
    pool: int = 0
    process: int = 0
    kv_host: int = 0
    problem: str | None = None

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.process + self.kv_host

    def total_of(self, num_engines: int) -> int:
        """Return the memory of a server with several engines, in bytes. Each has its own weights and pool."""
        return self.total + (num_engines - 1) * (self.total - GATEWAY_BYTES)


def has_products_by_codes(device: str) -> bool:
    """Return whether the device computes with quantised weights. If not, they are dequantised when loaded."""
    return device != "cpu" or integer_products(host_features()) is not None


def plan_memory(
    model_dir: Path,
    device: str,
    pool_bytes: int | None = None,
    max_model_len: int | None = None,
    kv_host_bytes: int = 0,
) -> list[MemoryPlan]:
    """Return plans for bfloat16, for the checkpoint's own format and, if the checkpoint is not quantised, for each
    value of `--quantization`.

    Reads the headers and, in a quantised checkpoint, the first weight of each kind. Raises ModelNotSupported.
    """
    model_dir = model_directory(model_dir)
    config = ModelConfig.load(model_dir)
    check_shapes(config, stored_tensors(model_dir))
    checkpoint = checkpoint_of(model_dir)
    keeps = has_products_by_codes(device)
    pool = DEFAULT_BYTES if pool_bytes is None else pool_bytes
    process = PROCESS_BYTES + _rotary_bytes(config, max_model_len or config.max_model_len)
    sizes = _Sizes(config, "bfloat16", device)
    plans = [MemoryPlan("bfloat16", sizes.total({}), pool, process)]
    names = quantized_names(config)
    for method in CHOICES if config.quantization is None else ():
        try:
            codes = _method_bytes(config, names, method, device) if keeps else {}
        except ModelNotSupported as error:
            plans.append(MemoryPlan(method, problem=str(error)))
        else:
            plans.append(MemoryPlan(method, sizes.total(codes), pool, process))
    own = resolve_dtype("auto", config, device)
    if config.quantization is not None:
        try:
            codes = _coded_bytes(checkpoint, device) if keeps else {}
        except BaseNotSupported as error:
            raise ModelNotSupported(str(error)) from error
        plans.append(MemoryPlan(config.quantization.name, _Sizes(config, own, device).total(codes), pool, process))
    elif own != "bfloat16":
        plans.append(MemoryPlan(own, _Sizes(config, own, device).total({}), pool, process))
    return [replace(plan, kv_host=kv_host_bytes) for plan in plans]


def plan_engine(config: EngineConfig, method: str | None) -> MemoryPlan:
    """Return the plan for the format of an engine's weights. `method` is the value of `--quantization`, if it is set.

    Raises ModelNotSupported.
    """
    model_dir = Path(config.model_dir)
    plans = plan_memory(model_dir, config.device, config.pool_bytes, config.max_model_len, config.kv_host_bytes)
    model = ModelConfig.load(model_dir)
    name = method or (config.dtype if model.quantization is None else model.quantization.name)
    found = next((plan for plan in plans if plan.format == name), None)
    # A model in bfloat16 can also be served in float32.
    return found or replace(plans[0], format=name, weights=_Sizes(model, config.dtype, config.device).total({}))


def plan_tokens(
    model_dir: Path, device: str, pool_bytes: int | None = None, max_model_len: int | None = None
) -> dict[str, int]:
    """Return how many tokens of K and V fit into an empty pool, by value of `--kv-dtype`. Raises ModelNotSupported."""
    config = ModelConfig.load(model_directory(model_dir))
    dtype = resolve_dtype("auto", config, device)
    tokens: dict[str, int] = {}
    for kv_dtype in KV_DTYPES:
        itemsize = kv_itemsize(dtype, kv_dtype)
        page_bytes = config.geometry(itemsize, ITEMSIZE[dtype]).pool_page_bytes
        layout = kv_layout(config, max_model_len or config.max_model_len, itemsize)
        tokens[kv_dtype] = layout.num_tokens((DEFAULT_BYTES if pool_bytes is None else pool_bytes) // page_bytes)
    return tokens


class _Sizes:
    """The sizes of a model's weights in memory."""

    def __init__(self, config: ModelConfig, dtype: str, device: str) -> None:
        self._itemsize = ITEMSIZE[dtype]
        self._elements = {name: math.prod(shape) for name, shape in weight_shapes(config).items()}
        if device == "cpu" and HEAD not in self._elements:
            # A CPU also keeps a tied head as a copy of the embedding that is laid out for matrix products.
            self._elements[HEAD] = self._elements[EMBEDDING]

    def total(self, codes: dict[str, int]) -> int:
        """Return the size of all weights in bytes. `codes` gives the sizes of the weights that stay quantised."""
        sizes = {name: self._itemsize * count for name, count in self._elements.items()}
        # A head that is tied to the embedding can be quantised separately.
        return sum({**sizes, **{name: size for name, size in codes.items() if name in {*sizes, HEAD}}}.values())


def _method_bytes(config: ModelConfig, names: Collection[str], method: str, device: str) -> dict[str, int]:
    """Return the size in bytes of each weight that stays quantised on the device."""
    known = weight_shapes(config)
    shapes = {name: known[name] for name in names}
    linears = METHODS[method.removesuffix(WITH_HEAD)]
    group = linears.group({in_features for _, in_features in shapes.values()})
    # A CPU dequantises FP8.
    kept = {} if linears is METHODS["fp8"] and device == "cpu" else shapes
    # A few weights of an int4 model may get 8 bits. Which ones depends on their values, so the plan allows for all.
    allowance = 1 if group is None else 1 + EXTRA_BYTES
    sizes = {
        name: math.ceil(allowance * linears.nbytes(out, in_features, group))
        for name, (out, in_features) in kept.items()
    }
    if method.endswith(WITH_HEAD):
        out, in_features = known[EMBEDDING]
        sizes[HEAD] = HEAD_METHOD.nbytes(out, in_features, None)
    return sizes


def _coded_bytes(checkpoint: CheckpointTensors, device: str) -> dict[str, int]:
    """Return the size in bytes of each weight that stays quantised. Only the first weight of each kind is read."""
    known: dict[tuple[str, str, tuple[int, ...], frozenset[str]], int | None] = {}
    sizes: dict[str, int] = {}
    for name, coded in checkpoint.coded.items():
        if name == EMBEDDING:
            continue
        # Weights that differ only in their layer or expert number have equal sizes.
        kind = (_NUMBER.sub("", name), coded.dtype, coded.shape, frozenset(coded.parts.tensors))
        if kind not in known:
            known[kind] = _kept_bytes(coded.read(), device)
        kept = known[kind]
        if kept is not None:
            sizes[name] = kept
    return sizes


def _kept_bytes(weight: CodedWeight, device: str) -> int | None:
    """Return the size in bytes of a weight that stays quantised on the device, or None if it is dequantised."""
    if isinstance(weight, Mxfp4Experts):
        size = _kept_bytes(weight.experts[0], device)
        return None if size is None else size * len(weight.experts)
    if isinstance(weight, ReorderedWeight):
        weight = weight.by_group
    assert isinstance(weight, QuantizedWeight)
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
