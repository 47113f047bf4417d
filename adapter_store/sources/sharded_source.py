"""Presents a source whose tensors are divided into shards, or in mlx-lm's format, like one with PEFT's two files."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import MLX_FILE, TENSORS_FILE
from loramux.adapter_store.formats.mlx.base_facts import BaseFacts
from loramux.adapter_store.formats.mlx.conversion import convert_mlx
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.sharded_tensors import INDEX_FILE, MAX_INDEX_BYTES, ShardIndex, join_shards
from loramux.adapter_store.sources.adapter_sources import Source


class JoinedSource:
    """The files of `source`, with its shards joined, or mlx-lm's files converted for `target`, in the directory
    `scratch`; see `Source`.

    A source that has the tensors file, or neither an index of shards nor mlx-lm's file, is left as it is. Of mlx-lm's
    files, fetch the configuration first, and both into `scratch`: the tensors also replace the configuration by PEFT's.
    """

    def __init__(self, source: Source, scratch: Path, target: PackTarget) -> None:
        self._source = source
        self._scratch = scratch
        self._target = target

    @property
    def facts(self) -> dict[str, Any]:
        return self._source.facts

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def size(self, name: str, max_bytes: int) -> int:
        """Return the size of a file. For shards, it is their total size, which differs from the joined file's by the
        headers. For mlx-lm's file, it is the size before the conversion, which at most doubles it.
        """
        if name == TENSORS_FILE and self._is_mlx:
            name = MLX_FILE
        if name != TENSORS_FILE or self._index is None:
            return self._source.size(name, max_bytes)
        total = sum(self._source.size(shard, max_bytes) for shard in self._index.shards)
        if total > max_bytes:
            raise AdapterRejected("file_too_large", f"the shards are larger than {max_bytes} bytes", INDEX_FILE)
        return total

    def fetch_file(self, name: str, destination: Path, max_bytes: int) -> None:
        if name == TENSORS_FILE and self._is_mlx:
            self._source.fetch_file(MLX_FILE, self._scratch / MLX_FILE, max_bytes)
            convert_mlx(self._scratch, self._scratch, lambda: BaseFacts.of(self._target))
            (self._scratch / MLX_FILE).unlink()
            return
        if name != TENSORS_FILE or self._index is None:
            self._source.fetch_file(name, destination, max_bytes)
            return
        for shard in self._index.shards:
            self._source.fetch_file(shard, self._scratch / shard, self._source.size(shard, max_bytes))
        join_shards(self._index, self._scratch, destination)
        for shard in self._index.shards:
            (self._scratch / shard).unlink()

    @cached_property
    def _is_mlx(self) -> bool:
        return not self._source.has(TENSORS_FILE) and self._source.has(MLX_FILE)

    @cached_property
    def _index(self) -> ShardIndex | None:
        if self._source.has(TENSORS_FILE) or not self._source.has(INDEX_FILE):
            return None
        path = self._scratch / INDEX_FILE
        self._source.fetch_file(INDEX_FILE, path, self._source.size(INDEX_FILE, MAX_INDEX_BYTES))
        index = ShardIndex.parse(path.read_bytes())
        path.unlink()
        return index
