"""How much memory a server takes with a model's weights in each format, from the model's headers."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.quantization.base_format import Checkpoint, CodedTensor
from loramux.engine.config import ITEMSIZE, resolve_dtype
from loramux.engine.errors import ModelNotSupported
from loramux.engine.model.model_config import ModelConfig
from loramux.engine.model.weight_files import EMBEDDING, HEAD, checkpoint_of, stored_tensors
from loramux.engine.model.weight_shapes import check_shapes, weight_shapes
from loramux.engine.pages.pool_size import DEFAULT_BYTES
from loramux.engine.quantizing.methods import METHODS
from loramux.engine.quantizing.quantize import quantized_names
from loramux.kernels.cpu.capability import host_features, integer_products
from loramux.kernels.quantized import QuantizedWeight

PROCESS_BYTES = 570 << 20
"""Memory of a server's processes without model, pool and host tier, measured on Linux with Python 3.11 on a CPU."""

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory in bytes that a server takes with one format of weights; `problem` says why a format cannot be used.

    `weights` includes the embedding and the head. `process` is everything else but the pool.
    """

    format: str
    weights: int = 0
    pool: int = 0
    process: int = 0
    problem: str | None = None

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.process


def has_products_by_codes(device: str) -> bool:
    """Whether a device keeps codes in memory; others dequantise weights when they load them."""
    return device == "cpu" and integer_products(host_features()) is not None


def plan_memory(
    model_dir: Path, device: str, pool_bytes: int | None = None, max_model_len: int | None = None
) -> list[Plan]:
    """Plans for bfloat16, for each `--quantization`, and for the checkpoint's own format if it is quantised.

    Raises ModelNotSupported. Reads the headers and, in a quantised checkpoint, the first weight of each kind.
    """
    config = ModelConfig.load(model_dir)
    check_shapes(config, stored_tensors(model_dir))
    checkpoint = checkpoint_of(model_dir)
    keeps = has_products_by_codes(device)
    pool = DEFAULT_BYTES if pool_bytes is None else pool_bytes
    process = PROCESS_BYTES + _rotary_bytes(config, max_model_len or config.max_model_len)
    sizes = _Sizes(config, "bfloat16", device)
    plans = [Plan("bfloat16", sizes.total({}), pool, process)]
    names = quantized_names(config)
    for method in METHODS if config.quantization is None else ():
        try:
            codes = _method_bytes(config, names, method) if keeps and method != "fp8" else {}
        except ModelNotSupported as error:
            plans.append(Plan(method, problem=str(error)))
        else:
            plans.append(Plan(method, sizes.total(codes), pool, process))
    own = resolve_dtype("auto", config, device)
    if config.quantization is not None:
        try:
            codes = _coded_bytes(checkpoint, names) if keeps else {}
        except BaseNotSupported as error:
            raise ModelNotSupported(str(error)) from error
        plans.append(Plan(config.quantization.name, _Sizes(config, own, device).total(codes), pool, process))
    elif own != "bfloat16":
        plans.append(Plan(own, _Sizes(config, own, device).total({}), pool, process))
    return plans


class _Sizes:
    """The size of a model in memory."""

    def __init__(self, config: ModelConfig, dtype: str, device: str) -> None:
        self._itemsize = ITEMSIZE[dtype]
        self._elements = {name: math.prod(shape) for name, shape in weight_shapes(config).items()}
        if device == "cpu" and HEAD not in self._elements:
            # A tied head is laid out for products, which the embedding is not.
            self._elements[HEAD] = self._elements[EMBEDDING]

    def total(self, codes: dict[str, int]) -> int:
        """Size in bytes if the weights in `codes` take as many bytes as it says."""
        return sum(codes.get(name, self._itemsize * count) for name, count in self._elements.items())


def _method_bytes(config: ModelConfig, names: Collection[str], method: str) -> dict[str, int]:
    shapes = {name: weight_shapes(config)[name] for name in names}
    how = METHODS[method]
    group = how.group({in_features for _, in_features in shapes.values()})
    bits = 4 if method == "int4" else 8
    return {
        name: out * in_features * bits // 8 + _SCALE_BYTES * out * (in_features // (group or in_features))
        for name, (out, in_features) in shapes.items()
    }


def _coded_bytes(checkpoint: Checkpoint, names: Collection[str]) -> dict[str, int]:
    """The size of each linear that stays quantised, after the first one of its name, shape and tensors."""
    known: dict[tuple[str, tuple[int, ...], frozenset[str]], int | None] = {}
    sizes: dict[str, int] = {}
    for name in names:
        coded = checkpoint.coded.get(name)
        if coded is None:
            continue
        kind = (name.split(".", 3)[-1], coded.shape, frozenset(coded.parts.tensors))
        if kind not in known:
            known[kind] = _kept_bytes(coded)
        kept = known[kind]
        if kept is not None:
            sizes[name] = kept
    return sizes


def _kept_bytes(coded: CodedTensor) -> int | None:
    """The size of a weight whose codes can be multiplied, or None: 4 bits, or 8 bits whose values are integers."""
    weight = coded.read()
    if not isinstance(weight, QuantizedWeight):
        return None
    is_integer = bool((np.nan_to_num(weight.codebook, nan=0.5) % 1 == 0).all())
    return weight.nbytes if weight.bits == 4 or is_integer else None


def _rotary_bytes(config: ModelConfig, max_len: int) -> int:
    """Size of the tables of cosines and sines, float32."""
    pairs = sum(
        1 if rope.kind == "none" else int(config.head_dim * rope.rotary_fraction) // 2
        for rope in dict.fromkeys(config.layer_ropes)
    )
    return 2 * 4 * max_len * pairs
