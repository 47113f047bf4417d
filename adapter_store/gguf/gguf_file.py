"""Adapters in GGUF files, which contain only float matrices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import ConversionRefused
from loramux.adapter_store.formats.files.float_formats import STORAGE, to_float32
from loramux.adapter_store.gguf.gguf_header import GgufTensor, HeaderParser, HeaderRules, open_regular

MAX_HEADER_BYTES = 4 << 20
"""Largest header, up to the tensors' data, in bytes. An adapter with 1,000 modules needs about 150,000 bytes."""


def _check_is_no_model(key: str, value: object) -> None:
    if key == "general.type" and value == "model":
        message = "the file contains a whole model, not an adapter: to serve it as a base, use loramux serve --model"
        raise ConversionRefused("not_an_adapter", message, key)


_RULES = HeaderRules(
    max_bytes=MAX_HEADER_BYTES,
    max_elements=MAX_HEADER_BYTES,
    dtypes=frozenset(STORAGE),
    advice="convert the adapter with --outtype f16, bf16 or f32",
    check_entry=_check_is_no_model,
)


class GgufFile:
    """An open GGUF file of an adapter. Raises ConversionRefused if a check of the header fails."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)
        try:
            size = os.fstat(self._file.fileno()).st_size
            start = self._file.read(MAX_HEADER_BYTES)
            if start[:4] != b"GGUF":
                message = "the file is not in GGUF format: to push an adapter in PEFT's format, choose its directory"
                raise ConversionRefused("not_gguf", message)
            self.metadata, self.tensors = HeaderParser(start, size, _RULES).parse()
            for tensor in self.tensors.values():
                _check_matrix(tensor)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self.tensors[name]
        self._file.seek(tensor.begin)
        storage = STORAGE[tensor.dtype]
        rows, columns = tensor.shape
        data = self._file.read(rows * columns * storage.itemsize)
        if len(data) != rows * columns * storage.itemsize:
            raise ConversionRefused("truncated_file", "the file was truncated during the read", name)
        return to_float32(np.frombuffer(data, storage).reshape(tensor.shape), tensor.dtype)


def _check_matrix(tensor: GgufTensor) -> None:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        message = f"the tensor has dimensions {list(tensor.shape)}, but must be a matrix"
        raise ConversionRefused("tensor_not_2d", message, tensor.name)
