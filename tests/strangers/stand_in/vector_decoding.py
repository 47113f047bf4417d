"""Stands in for vLLM's functions that read vectors from bytes. They are written with numpy, because torch is absent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
EMBED_DTYPES = tuple(NUM_BYTES)
ENDIANNESS = ("native", "big", "little")
_ORDERS = {"native": "=", "big": ">", "little": "<"}


class Vector(np.ndarray):  # type: ignore[type-arg]
    """Has the one method of torch's tensors that the tests call."""

    def to(self, _dtype: Any) -> Vector:
        return self


@dataclass
class MetadataItem:
    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: Sequence[int]


def binary2tensor(binary: bytes, shape: Sequence[int], embed_dtype: str, endianness: str) -> Vector:
    """Return the numbers as float32."""
    bits = np.frombuffer(binary, f"{_ORDERS[endianness]}u{NUM_BYTES[embed_dtype]}")
    return _numbers(bits.astype(bits.dtype.newbyteorder("=")), embed_dtype).reshape(shape).view(Vector)


def _numbers(bits: Any, embed_dtype: str) -> Any:
    if embed_dtype == "float32":
        return bits.view(np.float32)
    if embed_dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    if embed_dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if embed_dtype == "fp8_e5m2":
        return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    exponent, fraction = (bits >> 3 & 15).astype(int), (bits & 7) / 8
    sizes = np.where(exponent == 0, np.ldexp(fraction, -6), np.ldexp(1 + fraction, exponent - 7))
    return np.where(bits >> 7, -sizes, sizes).astype(np.float32)


def build_metadata_items(embed_dtype: str, endianness: str, shape: Sequence[int], n_request: int) -> list[MetadataItem]:
    size = int(np.prod(shape)) * NUM_BYTES[embed_dtype]
    return [
        MetadataItem(index, embed_dtype, endianness, index * size, (index + 1) * size, shape)
        for index in range(n_request)
    ]


def decode_pooling_output(items: list[MetadataItem], body: bytes) -> list[Vector]:
    ordered = sorted(items, key=lambda item: item.index)
    return [
        binary2tensor(body[item.start : item.end], item.shape, item.embed_dtype, item.endianness) for item in ordered
    ]
