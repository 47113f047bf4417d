"""Stores the data that, with the canonical file, is needed to rebuild an upload's two required files byte for byte.

loramux keeps two blobs per version. One is the configuration as uploaded. The other is the header of the uploaded
safetensors file, including its length, followed by the JSON object `{"ranges": [[begin, end], ...]}`. These half-open
byte ranges of the canonical file, in this order, make up the data that followed the header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loramux.adapter_store.errors import AdapterCorrupt
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE
from loramux.adapter_store.formats.files.safetensors_header import LENGTH_BYTES, TensorEntry
from loramux.adapter_store.formats.files.tensor_file import TensorFile
from loramux.adapter_store.formats.packed.canonical import MAX_HEADER_BYTES, CanonicalAdapter

_CHUNK_BYTES = 1 << 18


def config_key(version_id: str) -> str:
    return f"originals/{version_id}/{CONFIG_FILE}"


def header_key(version_id: str) -> str:
    return f"originals/{version_id}/header"


@dataclass(frozen=True, slots=True)
class KeptHeader:
    """The uploaded safetensors file without its data. The data is in the canonical file."""

    header: bytes
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensors: Path, canonical: Path) -> KeptHeader:
        """Find each uploaded tensor in the canonical file by its bytes, because the names there may differ.

        Raises AdapterCorrupt if a tensor is missing.
        """
        with TensorFile(tensors, MAX_HEADER_BYTES) as uploaded, CanonicalAdapter(canonical) as kept:
            entries, kept_start, start = kept.header.tensors, kept.header.data_start, uploaded.header.data_start
            places: dict[bytes, TensorEntry] = {}
            ranges: list[tuple[int, int]] = []
            with tensors.open("rb") as sent, canonical.open("rb") as stored:
                header = sent.read(start)
                for entry in sorted(uploaded.header.tensors.values(), key=lambda entry: (entry.begin, entry.end)):
                    # Most tensors keep their names, and a comparison takes half as long as a hash.
                    place = entries.get(entry.name)
                    if place is None or not _is_same(sent, start, entry, stored, kept_start, place):
                        places = places or {_sha256(stored, kept_start, one): one for one in entries.values()}
                        place = places.get(_sha256(sent, start, entry))
                    if place is None:
                        raise AdapterCorrupt("the canonical file lacks a tensor of the upload")
                    begin, end = kept_start + place.begin, kept_start + place.end
                    if ranges and ranges[-1][1] == begin:
                        ranges[-1] = (ranges[-1][0], end)
                    else:
                        ranges.append((begin, end))
        return cls(header, tuple(ranges))

    @classmethod
    def decode(cls, data: bytes) -> KeptHeader:
        try:
            end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
            ranges = tuple((int(begin), int(stop)) for begin, stop in json.loads(data[end:])["ranges"])
        except (ValueError, TypeError, KeyError) as error:
            raise AdapterCorrupt("the stored header of an upload is damaged") from error
        return cls(data[:end], ranges)

    def encode(self) -> bytes:
        return self.header + json.dumps({"ranges": self.ranges}, separators=(",", ":")).encode()

    def rebuild(self, canonical: BinaryIO) -> Iterator[bytes]:
        yield self.header
        for begin, end in self.ranges:
            canonical.seek(begin)
            yield from _read(canonical, end - begin)


def sha256_of(chunks: Iterable[bytes]) -> str:
    hashed = hashlib.sha256()
    for chunk in chunks:
        hashed.update(chunk)
    return hashed.hexdigest()


def _is_same(
    one: BinaryIO, one_start: int, entry: TensorEntry, other: BinaryIO, other_start: int, place: TensorEntry
) -> bool:
    """Return whether two files have the same bytes at these tensors."""
    num_bytes = entry.end - entry.begin
    if num_bytes != place.end - place.begin:
        return False
    one.seek(one_start + entry.begin)
    other.seek(other_start + place.begin)
    pairs = zip(_read(one, num_bytes), _read(other, num_bytes), strict=True)
    return all(mine == theirs for mine, theirs in pairs)


def _sha256(file: BinaryIO, start: int, entry: TensorEntry) -> bytes:
    file.seek(start + entry.begin)
    hashed = hashlib.sha256()
    for chunk in _read(file, entry.end - entry.begin):
        hashed.update(chunk)
    return hashed.digest()


def _read(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0:
        chunk = file.read(min(num_bytes, _CHUNK_BYTES))
        if not chunk:
            raise AdapterCorrupt("a file ends early")
        num_bytes -= len(chunk)
        yield chunk
