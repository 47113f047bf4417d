"""Joins the shards of an adapter's tensors file into one file.

Some trainers divide the tensors of a large adapter like those of a base: `adapter_model-00001-of-00002.safetensors` and
so on, with an index that maps each tensor to its file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.safetensors_header import LENGTH_BYTES, TensorEntry
from loramux.adapter_store.formats.files.strict_json import DuplicateKey, InvalidJson, parse_strict_json
from loramux.adapter_store.formats.files.tensor_file import TensorFile
from loramux.adapter_store.formats.packed.canonical import MAX_HEADER_BYTES

INDEX_FILE = "adapter_model.safetensors.index.json"
MAX_INDEX_BYTES = 8 << 20
MAX_SHARDS = 100
_SHARD = re.compile(r"adapter_model-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors", re.ASCII)
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The names of an adapter's shards, in order, and the shard of each tensor, or None if there is no index."""

    shards: tuple[str, ...]
    shard_of: Mapping[str, str] | None

    @classmethod
    def parse(cls, text: bytes) -> ShardIndex:
        """Parse an index. Raises AdapterRejected, also for a file outside the adapter's directory."""
        if len(text) > MAX_INDEX_BYTES:
            raise AdapterRejected("file_too_large", f"the index is larger than {MAX_INDEX_BYTES} bytes", INDEX_FILE)
        try:
            document = parse_strict_json(text)
        except (DuplicateKey, InvalidJson) as error:
            raise AdapterRejected("invalid_index", f"the index is not JSON: {error}", INDEX_FILE) from None
        shard_of = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(shard_of, dict) or not all(isinstance(name, str) for name in shard_of.values()):
            raise AdapterRejected("invalid_index", "weight_map must map tensors to files", INDEX_FILE)
        for tensor, name in shard_of.items():
            if not _SHARD.fullmatch(name):
                message = "a file in the index must be a shard in the adapter's own directory"
                raise AdapterRejected("invalid_index", message, f"weight_map.{tensor}")
        return cls(_all_shards(frozenset(shard_of.values())), shard_of)

    @classmethod
    def of_names(cls, names: Collection[str]) -> ShardIndex | None:
        """Find the shards among a directory's files, or return None if there are none. Raises AdapterRejected."""
        found = frozenset(filter(_SHARD.fullmatch, names))
        return cls(_all_shards(found), None) if found else None


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def _all_shards(names: Collection[str]) -> tuple[str, ...]:
    """Return the names in order. Raises AdapterRejected unless they are all shards of one file."""
    counts = {match["count"] for name in names if (match := _SHARD.fullmatch(name)) is not None}
    if len(counts) != 1 or not 1 <= int(min(counts)) <= MAX_SHARDS:
        message = f"the shards must be the parts of one file, and at most {MAX_SHARDS}"
        raise AdapterRejected("invalid_index", message, INDEX_FILE)
    (count,) = counts
    wanted = [f"adapter_model-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    missing = next((name for name in wanted if name not in names), None)
    if missing is not None:
        raise AdapterRejected("missing_shard", "a shard of the adapter is missing", missing)
    if len(names) > len(wanted):
        raise AdapterRejected("invalid_index", "a shard's number is larger than the number of shards", INDEX_FILE)
    return tuple(wanted)


def join_shards(index: ShardIndex, directory: Path, destination: Path) -> None:
    """Write the tensors of all shards in `directory` into one safetensors file.

    Raises AdapterRejected if a shard is missing or malformed, or if the index disagrees with the shards.
    """
    with ExitStack() as stack:
        files = []
        for name in index.shards:
            if not (directory / name).is_file():
                raise AdapterRejected("missing_shard", "a shard of the adapter is missing", name)
            files.append(stack.enter_context(TensorFile((directory / name).resolve(), MAX_HEADER_BYTES)))
        header = _joined_header(index, files)
        with destination.open("wb") as out:
            out.write(len(header).to_bytes(LENGTH_BYTES, "little"))
            out.write(header)
            for file in files:
                for entry in _in_order(file):
                    out.writelines(file.stored(entry.name))


def _joined_header(index: ShardIndex, files: Sequence[TensorFile]) -> bytes:
    document: dict[str, object] = {}
    position = 0
    for name, file in zip(index.shards, files, strict=True):
        for entry in _in_order(file):
            if entry.name in document:
                raise AdapterRejected("duplicate_key", "two shards have a tensor of this name", entry.name)
            if index.shard_of is not None and index.shard_of.get(entry.name) != name:
                raise AdapterRejected("invalid_index", "the index does not place this tensor in this shard", entry.name)
            end = position + entry.end - entry.begin
            document[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (position, end)}
            position = end
    lost = min((index.shard_of or {}).keys() - document.keys(), default=None)
    if lost is not None:
        raise AdapterRejected("missing_tensor", "the index lists this tensor, but its shard lacks it", lost)
    header = json.dumps(document, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % _ALIGNMENT)


def _in_order(file: TensorFile) -> list[TensorEntry]:
    return sorted(file.header.tensors.values(), key=lambda entry: (entry.begin, entry.end))
