"""Reads a model's tensors by name from safetensors files, or from the GGUF files that a model directory names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.files.float_formats import STORAGE
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.files.text_names import with_prefix
from loramux.adapter_store.formats.quantization.base_format import CheckpointTensors, CodedTensor, is_zero_bias
from loramux.adapter_store.formats.quantization.divided import divided
from loramux.adapter_store.formats.quantization.parts import CodedWeight
from loramux.engine.architectures.stacked_experts import StackedPlace, stacked_place
from loramux.engine.architectures.weight_files import (
    EMBEDDING,
    HEAD,
    checkpoint_of,
    text_tensors,
    unreadable,
    weight_paths,
)
from loramux.engine.architectures.weight_shapes import (
    misshapen,
    misshapen_stack,
    missing,
    unexplained,
    unread,
    unused_tensors,
)
from loramux.engine.protocol.errors import ModelNotSupported

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class WeightSource(Protocol):
    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | CodedWeight:
        """The tensor `name`, as it is stored. Raises ModelNotSupported if it is missing or has a different shape."""
        ...


class Weights:
    """The tensors of one model directory, read one at a time so that only one copy is in memory."""

    def __init__(
        self,
        places: Mapping[str, tuple[safe_open, str]],
        checkpoint: CheckpointTensors,
        draft_tensors: tuple[str, ...],
    ) -> None:
        """`places` maps a tensor's name to a safetensors file and the name in this file. Other plain tensors are in
        GGUF files.
        """
        self._places = places
        self._checkpoint = checkpoint
        self._plain, self._coded = checkpoint.plain, checkpoint.coded
        self._draft_tensors = draft_tensors
        self._unread = {*self._plain, *self._coded}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | CodedWeight:
        self._unread.discard(name)
        if name in self._coded:
            coded = self._coded[name]
            # Compare the shapes before reading the weight, because reading can take a lot of memory.
            if coded.shape != shape:
                raise misshapen(name, coded.shape, shape)
            return _decode(coded)
        stack = stacked_place(name)
        if name in self._plain:
            tensor = self._read(name)
        elif stack is not None and stack.name in self._places:
            tensor = self._read_expert(stack, shape)
        else:
            raise missing(name)
        if tuple(tensor.shape) != shape:
            raise misshapen(name, tuple(tensor.shape), shape)
        return tensor

    def part(self, name: str, shape: tuple[int, ...], axis: int, ranges: Sequence[range]) -> torch.Tensor | CodedWeight:
        """The indices in `ranges` along `axis` of the tensor `name`, which has `shape`. Of a float tensor in a
        safetensors file, nothing else is read.

        Raises ModelNotSupported if the tensor is missing or has a different shape, or if a quantised weight cannot be
        divided in this way.
        """
        if name in self._places:
            self._unread.discard(name)
            found = tuple(self._plain[name].shape)
            if found != shape:
                raise misshapen(name, found, shape)
            file, stored = self._places[name]
            source = file.get_slice(stored)
        else:
            source = self.tensor(name, shape)
            if not isinstance(source, torch.Tensor):
                try:
                    return divided(source, axis, ranges)
                except ValueError as error:
                    raise ModelNotSupported(f"the quantised weight {name} cannot be divided: {error}") from error
        before = (slice(None),) * axis
        parts = [_float(name, source[(*before, slice(one.start, one.stop))]) for one in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

    def has_any(self, prefix: str) -> bool:
        """True if the name of a tensor begins with `prefix`."""
        return any(name.startswith(prefix) for name in (*self._plain, *self._coded))

    @property
    def has_quantized_head(self) -> bool:
        return HEAD in self._coded

    def check_all_read(self) -> None:
        """Raise ModelNotSupported if a tensor is unread, because the model then needs a computation that is not
        supported.
        """
        unread_names = [name for name in self._unread if not is_zero_bias(name, self._checkpoint)]
        unused = unused_tensors(unread_names, self._draft_tensors)
        # A head tied to the embedding may be stored separately if the two are equal.
        if unused == [HEAD] and HEAD in self._plain and EMBEDDING in self._plain:
            if not torch.equal(self._read(HEAD), self._read(EMBEDDING)):
                raise ModelNotSupported(
                    f"config.json ties {HEAD} to {EMBEDDING}, or names a decoder without a head, but the two differ"
                )
            return
        if unused:
            raise unread(unused)

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._places:
            return _mapped(name, self._plain[name])
        file, stored = self._places[name]
        return _float(name, file.get_tensor(stored))

    def _read_expert(self, stack: StackedPlace, shape: tuple[int, ...]) -> torch.Tensor:
        self._unread.discard(stack.name)
        file, stored = self._places[stack.name]
        stacked = file.get_slice(stored)
        stack_shape = tuple(stacked.get_shape())
        is_transposed = stack.is_transposed(stack_shape, shape)
        if is_transposed is None:
            raise misshapen_stack(stack, stack_shape)
        tensor = _float(stack.name, stacked[stack.index(shape, is_transposed)])
        return tensor.T.contiguous() if is_transposed else tensor


def _mapped(name: str, tensor: MappedTensor) -> torch.Tensor:
    """A copy of a float tensor of a GGUF file."""
    if tensor.dtype not in STORAGE:
        raise unexplained(name, tensor.dtype)
    values = torch.from_numpy(np.array(tensor.array()))
    return values.view(torch.bfloat16) if tensor.dtype == "BF16" else values


def _float(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in _FLOATS:
        raise unexplained(name, str(tensor.dtype).removeprefix("torch."))
    return tensor


def _decode(coded: CodedTensor) -> CodedWeight:
    try:
        return coded.read()
    except BaseNotSupported as error:
        raise ModelNotSupported(str(error)) from error


@contextmanager
def open_weights(
    model_dir: Path, quantized_dir: Path | None = None, draft_tensors: tuple[str, ...] = ()
) -> Iterator[Weights]:
    """Open `model.safetensors`, or the shards that `model.safetensors.index.json` names, and GGUF files.

    Weights in `quantized_dir` replace weights with the same name.

    On exit, raises ModelNotSupported if a tensor was not read, unless its name begins with one of `draft_tensors`.
    """
    with ExitStack() as stack:
        places: dict[str, tuple[safe_open, str]] = {}
        for path in weight_paths(model_dir):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise unreadable(path, error) from error
            places.update((name, (file, stored)) for name, stored in text_tensors(file.keys(), places))
        checkpoint = checkpoint_of(model_dir, quantized_dir)
        files = {name: place for name, place in with_prefix(places).items() if name in checkpoint.plain}
        weights = Weights(files, checkpoint, draft_tensors)
        yield weights
        weights.check_all_read()
