"""Writes the quantised linear layers of a float model to a directory, block by block."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.files.float_formats import STORAGE
from loramux.adapter_store.formats.files.mapped_tensors import STORED, MappedTensor
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import EMBEDDING, HEAD, checkpoint_of, stored_tensors
from loramux.engine.architectures.weight_shapes import check_shapes, weight_shapes
from loramux.engine.parallel.sharding import worker_config
from loramux.engine.protocol.errors import ConfigNotUsable, ModelNotSupported
from loramux.engine.quantizing.methods import HEAD_METHOD, INT4, METHODS, SENSITIVE_METHOD, WITH_HEAD, Floats, Method
from loramux.engine.quantizing.sensitivity import sensitive_weights

VERSION = 3
"""Increased when the meaning of the files changes, so that files from older versions are not used."""

_UNFINISHED = "unfinished-"
_BLOCK_ELEMENTS = 1 << 22
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the new file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORED[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class _Job:
    """A weight to quantise and store as `name`, in groups of `group` inputs, or in one group per output if None."""

    name: str
    tensor: MappedTensor
    method: Method
    group: int | None


def quantized_directory(root: Path, model_dir: Path, method: str) -> Path:
    """The directory below `root` for the quantised weights of this model."""
    identity = f"{VERSION} {method} {BaseWeights(model_dir).fingerprint}"
    return root / hashlib.sha256(identity.encode()).hexdigest()[:32]


def quantized_groups(config: ModelConfig) -> list[list[str]]:
    """The weights that every method quantises: the linear layers of attention, delta rules and feed-forward blocks.

    Weights of one group share an input, so they are multiplied together. Routers, experts and the linear layers of
    layer inputs are not quantised.
    """
    modules = config.modules
    return [
        [f"model.layers.{layer}.{modules[index].name}.weight" for index in group]
        for layer in range(config.num_layers)
        # The last group contains the router.
        for group in config.layer_groups(layer)[:-1]
    ]


def quantized_names(config: ModelConfig) -> list[str]:
    return [name for group in quantized_groups(config) for name in group]


def shared_group(config: ModelConfig, method: str, num_workers: int = 1) -> int | None:
    """Number of inputs that share a scale in weights quantised by `method`, one of `CHOICES`, or None for all inputs.

    Raises ModelNotSupported if no group fits, and ConfigNotUsable if `num_workers` workers cannot divide a weight by
    whole groups.
    """
    whole, own = weight_shapes(config), weight_shapes(worker_config(config, num_workers))
    names = quantized_names(config)
    group = METHODS[method.removesuffix(WITH_HEAD)].group({whole[name][1] for name in names})
    uneven = None if group is None else next((name for name in names if own[name][1] % group), None)
    if uneven is not None:
        raise ConfigNotUsable(
            f"tensor_parallel_size {num_workers} cannot divide the groups of {group} inputs of {uneven}: use "
            "--quantization int8"
        )
    return group


def quantize(model_dir: Path, destination: Path, method: str, progress: Callable[[int, int], None]) -> None:
    """Write the directory `destination` in the format of compressed-tensors. It appears only once it is complete.

    `method` is one of `CHOICES`. `progress` is called with the number of weight elements quantised so far, and with the
    number to quantise in total. Raises ModelNotSupported or ConfigNotUsable.
    """
    config = ModelConfig.load(model_dir)
    if config.quantization is not None:
        raise ConfigNotUsable(f"the weights are already quantised ({config.quantization.name}): omit --quantization")
    check_shapes(config, stored_tensors(model_dir))
    plain = checkpoint_of(model_dir).plain
    tensors = {name: plain[name] for name in quantized_names(config)}
    how = METHODS[method.removesuffix(WITH_HEAD)]
    group = how.group({tensor.shape[1] for tensor in tensors.values()})
    better: set[str] = set()
    if how is INT4:
        assert group is not None
        better = sensitive_weights(quantized_groups(config), tensors, group)
    jobs = [
        _Job(name, tensor, SENSITIVE_METHOD, None) if name in better else _Job(name, tensor, how, group)
        for name, tensor in tensors.items()
    ]
    if method.endswith(WITH_HEAD):
        # A head that is tied to the embedding is written as a separate weight.
        jobs.append(_Job(HEAD, plain[EMBEDDING if config.tied_embeddings else HEAD], HEAD_METHOD, None))
    unfinished = destination.with_name(f"{_UNFINISHED}{os.getpid()}")
    for left in destination.parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        _write(unfinished / "model.safetensors", jobs, progress)
        (unfinished / "config.json").write_text(json.dumps({"quantization_config": _description(jobs)}))
        os.replace(unfinished, destination)
    except OSError as error:
        raise ConfigNotUsable(f"the quantised weights cannot be written to {destination}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _description(jobs: list[_Job]) -> dict[str, Any]:
    schemes: list[dict[str, Any]] = []
    for job in jobs:
        scheme = {**job.method.weights, "group_size": job.group}
        if scheme not in schemes:
            schemes.append(scheme)
    groups = {f"group_{index}": {"targets": ["Linear"], "weights": scheme} for index, scheme in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def _write(path: Path, jobs: list[_Job], progress: Callable[[int, int], None]) -> None:
    entries = [entry for job in jobs for entry in _entries(job)]
    needed = sum(entry.nbytes for entry in entries)
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise ConfigNotUsable(f"the quantised weights take {needed} bytes, but {path.parent} has {free} bytes free")
    done, total = 0, sum(math.prod(job.tensor.shape) for job in jobs)
    with path.open("wb") as file:
        _write_header(file, entries)
        for job in jobs:
            out_features, in_features = job.tensor.shape
            scales: list[Floats] = []
            minima: list[Floats] = []
            num_rows = max(1, _BLOCK_ELEMENTS // in_features)
            for begin in range(0, out_features, num_rows):
                rows = job.tensor.float_rows(begin, min(begin + num_rows, out_features))
                if not np.isfinite(rows).all():
                    raise ModelNotSupported(f"the tensor {job.name} contains a value that is not finite")
                encoded = job.method.encode(rows, job.group or in_features)
                file.write(np.ascontiguousarray(encoded.items).data)
                scales.append(encoded.scales)
                minima += [] if encoded.minima is None else [encoded.minima]
                done += rows.size
                progress(done, total)
            for values in filter(None, (scales, minima)):
                file.write(_stored(job, np.concatenate(values)).data)
            if job.method.suffix == ".weight_packed":
                file.write(np.array(job.tensor.shape, "<i8").data)
        file.flush()
        os.fsync(file.fileno())


def _stored(job: _Job, values: Floats) -> npt.NDArray[Any]:
    """Scales or minima in the dtype of the file."""
    with np.errstate(over="ignore"):
        stored = values.astype(STORED[job.method.scale_dtype])
    if not np.isfinite(stored).all():
        raise ModelNotSupported(f"the weights of {job.name} are too large for 4 bits: use --quantization int8")
    return stored


def _entries(job: _Job) -> list[_Entry]:
    method, tensor = job.method, job.tensor
    if tensor.dtype not in STORAGE:
        raise ModelNotSupported(f"the tensor {job.name} has dtype {tensor.dtype}; only float weights can be quantised")
    out_features, in_features = tensor.shape
    module = job.name.removesuffix(".weight")
    grouped = out_features, in_features // (job.group or in_features)
    entries = [
        _Entry(module + method.suffix, method.dtype, (out_features, in_features // method.codes_per_item)),
        _Entry(f"{module}.weight_scale", method.scale_dtype, grouped),
    ]
    if method.has_minima:
        entries.append(_Entry(f"{module}.weight_minimum", method.scale_dtype, grouped))
    if method.suffix == ".weight_packed":
        entries.append(_Entry(f"{module}.weight_shape", "I64", (2,)))
    return entries


def _write_header(file: IO[bytes], entries: list[_Entry]) -> None:
    document: dict[str, object] = {}
    position = 0
    for entry in entries:
        end = position + entry.nbytes
        document[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(document, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
