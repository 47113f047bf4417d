"""The file format of a packed adapter: a header with each module's shape, rank and scale, then the pages.

    bytes [0, 8)    magic
    bytes [8, 12)   length of the header, little-endian
    bytes [12, 44)  SHA-256 of the header
    then the header (JSON), zeros up to a multiple of 4096, and the payload up to the end of the file

The header contains the payload's lane sums (`checksums.py`). Accidents are detected, except for about one of 130,000
pairs of flipped bits in one chunk of the payload: see `LaneSums`. Attacks are not detected, because a program that can
write the file can make both checksums match.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterCorrupt
from loramux.adapter_store.formats.files.checksums import PayloadCheck, lane_sums
from loramux.adapter_store.formats.packed.pack_target import PACK_FORMAT, PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.kernels.layout import AdapterLayout, RowCounts

HostMemory = Callable[[int], npt.NDArray[np.uint8]]
"""Allocates uint8 `[num_bytes]` of host memory. A GPU engine provides memory that the GPU can copy from directly."""

_MAGIC = b"LMXPACK" + bytes([PACK_FORMAT])
_PREFIX = struct.Struct("<8sI32s")
_PAYLOAD_ALIGNMENT = 4096
_MAX_HEADER_BYTES = 4 << 20
"""Largest header of a packed file, in bytes. The ranks and scales of 40,000 expert modules take about 1 MB."""

FIRST_READ_BYTES = 16 << 10
"""Size of the first read, in bytes. Most headers fit into it."""

_DAMAGED_HEADER = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    msgspec.DecodeError,
)
"""What the use of a header raises if values are missing, have wrong types, or are zero or too large. A header whose
checksum is right can be damaged too, if it was damaged before it was written.
"""


class _Header(msgspec.Struct, frozen=True):
    """The header fields that a reader needs. A `Raw` field is decoded only on demand."""

    digest: str
    pack_key: str
    target: msgspec.Raw
    num_pages: int
    ranks: msgspec.Raw
    outer_ranks: msgspec.Raw
    rows: msgspec.Raw
    scales: list[list[float]]
    outer_scales: list[float]
    has_affines: bool
    base: str | None
    lane_sums: str


def plain_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate ordinary memory."""
    return np.empty(num_bytes, np.uint8)


def write_packed(path: Path, packed: PackedAdapter, target: PackTarget, is_flushed: bool = True) -> None:
    """Write `packed` to `path` and, unless another copy will be kept, flush it to disk."""
    layout, outer_scales = packed.layout, packed.outer_scales
    num_outer = len(target.outer_modules)
    if not layout.outer_ranks[num_outer:].any():
        target, outer_scales = target.without_drafter, outer_scales[:num_outer]
    header = json.dumps(
        {
            "format": PACK_FORMAT,
            "digest": packed.digest,
            "pack_key": target.pack_key,
            "target": target.document(),
            "num_pages": packed.num_pages,
            "ranks": layout.ranks.tolist(),
            "scales": packed.scales.tolist(),
            "outer_ranks": layout.outer_ranks[: len(target.all_outer_modules)].tolist(),
            "outer_scales": outer_scales.tolist(),
            "has_affines": layout.has_affines,
            "base": packed.base,
            "rows": asdict(layout.rows),
            "lane_sums": lane_sums(packed.payload.reshape(-1)),
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode()
    with path.open("wb") as file:
        file.write(_PREFIX.pack(_MAGIC, len(header), hashlib.sha256(header).digest()))
        file.write(header)
        file.write(b"\0" * (-file.tell() % _PAYLOAD_ALIGNMENT))
        file.write(packed.payload.data)
        if is_flushed:
            file.flush()
            os.fsync(file.fileno())


def read_open_packed(
    descriptor: int,
    status: os.stat_result,
    check: PayloadCheck,
    target: PackTarget | None,
    digest: str | None,
    allocate: HostMemory,
) -> PackedAdapter:
    """Read a packed adapter from an open file into memory that `allocate` returns, verifying every byte.

    Raises AdapterCorrupt if a checksum does not match, or if the file belongs to another adapter or target than
    requested. The payload is read in order, directly into that memory, and `check` processes each chunk as it is read.
    Payload bytes that arrived with the header are read again.
    """
    header, payload_begin = _read_header(descriptor)
    try:
        found, layout = _laid_out(
            *map(bytes, (header.target, header.ranks, header.outer_ranks, header.rows)), header.has_affines
        )
        scales, outer_scales = np.array(header.scales, np.float32), np.array(header.outer_scales, np.float32)
    except _DAMAGED_HEADER:
        raise AdapterCorrupt("the packed file has no valid layout") from None
    if (target is not None and found not in (target, target.without_drafter)) or digest not in (None, header.digest):
        raise AdapterCorrupt(f"the packed file contains adapter {header.digest[:12]} for {header.pack_key}")
    if target is not None and found != target:
        layout = target.layout(layout.ranks, layout.outer_ranks, layout.has_affines, layout.rows)
        outer_scales = target.of_all_outer(outer_scales)
    shape = (header.num_pages, found.geometry.num_layers, found.geometry.page_bytes)
    num_bytes = shape[0] * shape[1] * shape[2]
    # Compare the sizes first, so that a damaged header does not determine how much memory is allocated.
    num_stored = status.st_size - payload_begin
    if layout.num_pages != header.num_pages or num_stored != num_bytes:
        raise AdapterCorrupt(f"the packed file has {num_stored} bytes of pages instead of {num_bytes}")
    payload = allocate(num_bytes)
    place = payload_begin

    def read(into: memoryview) -> int:
        nonlocal place
        num_read = os.preadv(descriptor, [into], place)
        place += num_read
        return num_read

    try:
        is_right = check.run(payload, header.lane_sums, read)
    except EOFError:
        raise AdapterCorrupt("the packed file was truncated during the read") from None
    if not is_right:
        raise AdapterCorrupt("the pages of the packed file are damaged")
    return PackedAdapter(header.digest, layout, scales, payload.reshape(shape), outer_scales, header.base)


@lru_cache(maxsize=256)
def _laid_out(
    target: bytes, ranks: bytes, outer_ranks: bytes, rows: bytes, has_affines: bool
) -> tuple[PackTarget, AdapterLayout]:
    """Return the target and the layout that a header's JSON describes.

    The result is cached, because computing a layout is slow and most adapters share a few layouts. Raises one of
    _DAMAGED_HEADER if the target or the layout is invalid.
    """
    found = PackTarget.from_document(json.loads(target))
    inner, outer = (np.array(json.loads(table), np.int32) for table in (ranks, outer_ranks))
    return found, found.layout(inner, outer, has_affines, msgspec.json.decode(rows, type=RowCounts))


def _read_header(descriptor: int) -> tuple[_Header, int]:
    """Return the header, and the offset at which the payload begins."""
    start = os.pread(descriptor, FIRST_READ_BYTES, 0)
    if len(start) < _PREFIX.size:
        raise AdapterCorrupt("the packed file ends inside its header")
    magic, length, checksum = _PREFIX.unpack_from(start)
    if magic != _MAGIC or length > _MAX_HEADER_BYTES:
        raise AdapterCorrupt("the file is not a packed adapter of this format version")
    end = _PREFIX.size + length
    if len(start) < end:
        start += os.pread(descriptor, end - len(start), len(start))
    text = start[_PREFIX.size : end]
    if hashlib.sha256(text).digest() != checksum:
        raise AdapterCorrupt("the header of the packed file is damaged")
    try:
        return msgspec.json.decode(text, type=_Header), end + -end % _PAYLOAD_ALIGNMENT
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise AdapterCorrupt("the header of the packed file is incomplete") from None
