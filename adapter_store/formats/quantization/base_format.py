"""Reads a checkpoint's format from its `quantization_config`, and finds the quantised weights among its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.extensions import ExtensionKind, ExtensionRefused
from loramux.adapter_store.formats.files.float_formats import STORAGE
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization.awq import parse_awq
from loramux.adapter_store.formats.quantization.bitsandbytes import parse_bitsandbytes
from loramux.adapter_store.formats.quantization.compressed_tensors import (
    CompressedTensorsFormat,
    parse_compressed_tensors,
)
from loramux.adapter_store.formats.quantization.fp8 import Fp8Format, parse_fp8
from loramux.adapter_store.formats.quantization.gguf import parse_gguf
from loramux.adapter_store.formats.quantization.gptq import parse_gptq
from loramux.adapter_store.formats.quantization.mxfp4 import parse_mxfp4
from loramux.adapter_store.formats.quantization.parts import CodedWeight, Parts
from loramux.adapter_store.formats.quantization.weight_format import WeightFormat

_PARSERS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "awq": parse_awq,
    "bitsandbytes": parse_bitsandbytes,
    "compressed-tensors": parse_compressed_tensors,
    "fbgemm_fp8": parse_fp8,
    "fp8": parse_fp8,
    "gguf": parse_gguf,
    "gptq": parse_gptq,
    "mxfp4": parse_mxfp4,
}
READABLE = tuple(sorted(_PARSERS))
"""The supported values of `quant_method`, without those of extensions."""

CHECKPOINT_FORMATS = ExtensionKind[WeightFormat](
    "checkpoint_formats", "checkpoint format", WeightFormat, taken=READABLE
)
"""Formats of extensions, by the value of `quant_method`. Each is called with the `quantization_config`, and raises
BaseNotSupported for one that it cannot read.
"""

_CACHE_SCALES = (".k_scale", ".v_scale")
"""Suffixes of the scales of keys and values.

The scales are ignored, because loramux does not quantise keys and values.
"""


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """One quantised weight of a checkpoint, not read yet. `dtype` is the dtype of its codes."""

    format: WeightFormat
    parts: Parts
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> CodedWeight:
        """Read the weight. At most two copies of its codes are in memory at the same time. Raises BaseNotSupported."""
        try:
            return self.format.read(self.parts)
        except ValueError as error:
            raise BaseNotSupported(f"the quantised weight {self.parts.module}: {error}") from error


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def kind_of(name: str, coded: CodedTensor) -> tuple[str, str, tuple[int, ...], frozenset[str]]:
    """The kind of the quantised weight `name`. Weights that differ only in their layer or expert number have the same
    kind, and so the same groups and size.
    """
    return _NUMBER.sub("", name), coded.dtype, coded.shape, frozenset(coded.parts.tensors)


@dataclass(frozen=True, slots=True)
class CheckpointTensors:
    """A checkpoint's quantised weights and other tensors, by their names in a checkpoint that is not quantised."""

    coded: Mapping[str, CodedTensor]
    plain: Mapping[str, MappedTensor]

    def with_coded(self, other: CheckpointTensors) -> CheckpointTensors:
        """Return this checkpoint with the quantised weights of `other`, which replace weights of the same names."""
        plain = {name: tensor for name, tensor in self.plain.items() if name not in other.coded}
        return CheckpointTensors({**self.coded, **other.coded}, plain)


def parse_format(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format that a `config.json` names, or None if it names none. Raises BaseNotSupported."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise BaseNotSupported("quantization_config in config.json is not an object")
    method = quantization.get("quant_method", "compressed-tensors" if "config_groups" in quantization else None)
    if isinstance(method, str) and method in _PARSERS:
        return _PARSERS[method](quantization)
    try:
        found = CHECKPOINT_FORMATS.make(method, quantization) if isinstance(method, str) else None
        names = (*READABLE, *CHECKPOINT_FORMATS.names)
    except ExtensionRefused as error:
        raise BaseNotSupported(str(error)) from error
    if found is None:
        raise BaseNotSupported(
            f"the quantisation {method!r:.60} (quantization_config in config.json) is not supported; use the float "
            f"weights with --quantization, or a checkpoint in one of these formats: {', '.join(names)}"
        )
    return found


def rounds_inputs(weight_format: WeightFormat | None) -> bool:
    """Return whether a checkpoint says that the inputs of its FP8 weights are rounded to FP8 when it is served."""
    return isinstance(weight_format, Fp8Format | CompressedTensorsFormat) and weight_format.rounds_inputs


def read_format(model_dir: Path) -> WeightFormat | None:
    """Return the format of a model directory, or None. Raises BaseNotSupported, OSError or ValueError."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    if not isinstance(config, dict):
        raise BaseNotSupported(f"{path} does not contain a JSON object")
    text = config.get("text_config")
    return parse_format({**text, **config} if isinstance(text, dict) else config)


def find_coded(weight_format: WeightFormat | None, tensors: Mapping[str, MappedTensor]) -> CheckpointTensors:
    """Use the stored tensors to tell quantised weights from ordinary tensors.

    Modules that the configuration exempts, for example in `ignore` or `modules_to_not_convert`, are stored as ordinary
    tensors. Raises BaseNotSupported for a weight that does not fit the format.
    """
    if weight_format is None:
        return CheckpointTensors({}, tensors)
    modules: dict[str, dict[str, MappedTensor]] = {}
    for name, tensor in tensors.items():
        for suffix in weight_format.suffixes:
            if name.endswith(suffix):
                modules.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
    coded: dict[str, CodedTensor] = {}
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(_CACHE_SCALES)}
    for module, stored in modules.items():
        if not weight_format.is_coded(stored):
            continue
        parts = Parts(module, stored)
        for suffix in stored:
            plain.pop(module + suffix, None)
        codes = max(stored.values(), key=lambda tensor: tensor.nbytes)
        coded[weight_format.weight_name(module)] = CodedTensor(
            weight_format, parts, weight_format.shape(parts), codes.dtype
        )
    twice = coded.keys() & plain.keys()
    if twice:
        raise BaseNotSupported(f"the model has the weight {min(twice)} in both quantised and unquantised form")
    return CheckpointTensors(coded, plain)


def is_zero_bias(name: str, checkpoint: CheckpointTensors) -> bool:
    """Return whether a tensor is the bias of a quantised weight, and all its values are zero.

    AutoGPTQ stores such a bias for layers that have none.
    """
    tensor = checkpoint.plain.get(name)
    if not name.endswith(".bias") or tensor is None or tensor.dtype not in STORAGE or len(tensor.shape) != 1:
        return False
    is_coded = name.removesuffix("bias") + "weight" in checkpoint.coded
    return is_coded and not tensor.float_rows(0, tensor.shape[0]).any()
